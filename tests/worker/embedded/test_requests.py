"""Exactly one end for every request, whichever thread it comes from, and nothing after it."""

import threading

import pytest

from wire.errors import ErrorCode, WireError
from worker.embedded.requests import Ledger, TokenOutput
from worker.engine.outputs import FinishReason, Token

CANCELLED = WireError(ErrorCode.CANCELLED, "cancelled")


def token(request_id: int, token_id: int, finish_reason: FinishReason | None = None) -> Token:
    return Token(request_id, token_id, 0, None, finish_reason)


def opened() -> tuple[Ledger, int, list[TokenOutput]]:
    heard: list[TokenOutput] = []
    book = Ledger()
    return book, book.open(3, heard.append), heard


def test_a_stop_token_is_no_part_of_the_text() -> None:
    book, request_id, heard = opened()
    book.on_token(token(request_id, 2, "stop"))
    assert heard == [TokenOutput(request_id, None, finish_reason="stop")]
    assert book.num_tokens == 0


def test_nothing_follows_an_end() -> None:
    book, request_id, heard = opened()
    book.end(request_id, "cancelled", CANCELLED)
    assert book.on_token(token(request_id, 5)) is None
    assert book.end(request_id, "error", CANCELLED) is None
    book.close("error", CANCELLED)
    assert heard == [TokenOutput(request_id, finish_reason="cancelled", error=CANCELLED)]


def test_closing_ends_all_and_opens_no_more() -> None:
    book, first, heard = opened()
    second = book.open(1, None)
    book.close("error", WireError(ErrorCode.INTERNAL, "broken"))
    assert len(heard) == 1 and book.num_open == 0
    for request_id in (first, second):
        result = book.result(request_id)
        assert result is not None and result.finish_reason == "error"
    book.close("cancelled", CANCELLED)
    with pytest.raises(WireError, match="broken"):
        book.open(1, None)


def test_the_result_is_there_when_the_end_is_heard() -> None:
    book = Ledger()
    found: list[object] = []
    request_id = book.open(1, lambda output: found.append(book.result(output.request_id)))
    book.on_token(token(request_id, 5, "length"))
    assert found == [book.result(request_id)] and found[0] is not None


def test_a_callback_that_raises_harms_nobody() -> None:
    book = Ledger()

    def callback(output: TokenOutput) -> None:
        raise RuntimeError("the caller's own")

    request_id = book.open(1, callback)
    book.on_token(token(request_id, 5))
    book.on_token(token(request_id, 6, "length"))
    result = book.result(request_id)
    assert result is not None and result.token_ids == (5, 6)


def test_old_results_are_forgotten() -> None:
    book = Ledger(max_results=2)
    request_ids = [book.open(1, None) for _ in range(3)]
    for request_id in request_ids:
        book.on_token(token(request_id, 5, "length"))
    assert [book.result(each) is not None for each in request_ids] == [False, True, True]


def test_threads_that_end_the_same_request_agree_on_one() -> None:
    book = Ledger()
    heard: list[TokenOutput] = []
    request_ids = [book.open(1, heard.append) for _ in range(500)]
    barrier = threading.Barrier(3)

    def end_all() -> None:
        barrier.wait()
        for request_id in request_ids:
            book.end(request_id, "cancelled", CANCELLED)

    threads = [threading.Thread(target=end_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(output.request_id for output in heard) == request_ids
    assert book.ends["cancelled"] == 500
