"""Which requests are remembered, for whom, and how many."""

from __future__ import annotations

import pytest
from msgspec import structs

from router.core.history.requests import MAX_OF_NAME, History
from router.core.request import Request
from router.core.state import Limits
from tests.router.scripted import RecordingSink, Router, first
from wire.errors import ErrorCode
from wire.frames import PrefillDone, PrefillRequest, Tag
from wire.options import Options


def router(**limits: int) -> Router:
    made = Router(Limits(max_attempts=1, **limits))  # type: ignore[arg-type]
    made.pair()
    made.sent.clear()
    return made


def submit(router: Router, name: str, client: str = "anna", prompt: int = 40) -> int:
    request = Request(tuple(range(prompt)), Options(), 0, client, name)
    return router.dispatcher.submit(request, RecordingSink())


def ask(router: Router, name: str, client: str = "anna", prompt: int = 40) -> None:
    submit(router, name, client, prompt)
    router.say(b"prefill-0-1", PrefillDone(router.prefill_id(), 0), first(7, "length"))


def names(history: History, *clients: str) -> list[str]:
    numbers = [f"r{number}" for number in range(20)]
    return [name for name in numbers for client in clients if history.find(name, client)]


def test_a_request_is_found_by_its_own_client_or_by_one_that_sees_all() -> None:
    it = router()
    ask(it, "r1", "anna")
    ask(it, "r1", "ben")
    history = it.dispatcher.history
    for client, count in (("anna", 1), ("ben", 1), ("carl", 0), ("", 0), (None, 2)):
        assert len(history.find("r1", client)) == count
        assert history.find("r2", client) == []


def test_a_request_that_waits_is_known_too() -> None:
    it = Router(Limits(max_attempts=1))
    it.pair()
    it.sent.clear()
    for peer in (b"prefill-0-1", b"decode-0-1"):
        worker = it.fleet.get(peer)
        assert worker is not None
        worker.num_active = 256
    handle = submit(it, "r1")
    [record] = it.dispatcher.history.find("r1", "anna")
    assert record.progress is not None and not record.placed
    it.dispatcher.cancel(handle)
    assert record.end is not None and record.end.outcome == "cancelled"
    assert record.cache is None and record.outline is None


def test_a_request_that_is_cancelled_before_it_is_read_is_compared_with_nothing() -> None:
    it = router()
    it.dispatcher.cancel(submit(it, "r1"))
    it.sent.clear()
    ask(it, "r2")
    [record] = it.dispatcher.history.find("r2", "anna")
    assert record.cache is not None and record.cache.earlier is None


def test_requests_of_one_id_are_the_choices_of_one_until_it_is_asked_again() -> None:
    it = router()
    for _ in range(3):
        submit(it, "r1")
    history = it.dispatcher.history
    assert len(history.find("r1", "anna")) == 3
    it.dispatcher.cancel_all(ErrorCode.CANCELLED, "")
    ask_again = submit(it, "r1")
    assert len(history.find("r1", "anna")) == 1
    it.dispatcher.cancel(ask_again)


def test_an_id_that_is_always_the_same_does_not_collect_records() -> None:
    it = router()
    for _ in range(MAX_OF_NAME + 5):
        submit(it, "r1")
    assert len(it.dispatcher.history.find("r1", "anna")) == 5


def test_no_more_than_the_limit_and_each_client_its_share() -> None:
    it = router(max_records=10)
    history = it.dispatcher.history
    for number in range(3):
        ask(it, f"r{number}", "quiet")
    for number in range(3, 20):
        ask(it, f"r{number}", "loud")
    assert len(history) == 10
    assert names(history, "quiet") == ["r0", "r1", "r2"]
    assert names(history, "loud") == [f"r{number}" for number in range(13, 20)]
    for number in range(20):
        ask(it, "x", f"c{number}")
    assert len(history) == 10
    assert all(len(history.find("x", f"c{number}")) == 1 for number in range(10, 20))
    assert names(history, "quiet", "loud") == []


@pytest.mark.parametrize(("max_records", "count"), [(0, 0), (10, 10)])
def test_records_are_dropped_while_their_requests_run(max_records: int, count: int) -> None:
    it = router(max_records=max_records)
    for number in range(15):
        submit(it, f"r{number}")
    assert len(it.dispatcher.history) == count
    it.dispatcher.cancel_all(ErrorCode.CANCELLED, "")
    assert len(it.dispatcher.history) == count
    assert all(structs.replace(end, record=None).client == "anna" for end in it.ends.ends)


def test_an_attempt_of_a_dropped_record_is_not_remembered() -> None:
    it = Router(Limits(max_records=1))
    for name in ("r1", "r2"):
        submit(it, name)
    it.pair()
    sent = [message.frame for _, message in it.take(Tag.PREFILL_REQUEST)]
    placed = [frame.request_id for frame in sent if isinstance(frame, PrefillRequest)]
    assert [it.dispatcher.history.name_of(None, each) for each in placed] == [None, "r2"]


def test_the_answer_belongs_to_what_a_later_prompt_is_compared_with() -> None:
    it = router()
    ask(it, "r1", prompt=40)
    submit_request = Request((*range(40), 7, 8, 9), Options(), 0, "anna", "r2")
    it.dispatcher.submit(submit_request, RecordingSink())
    it.say(b"prefill-0-1", PrefillDone(it.prefill_id(), 0), first(7, "length"))
    [record] = it.dispatcher.history.find("r2", "anna")
    assert record.cache is not None
    assert (record.cache.longest_match, record.cache.reusable) == (41, 32)
