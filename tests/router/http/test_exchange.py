"""One HTTP request and its log line."""

from __future__ import annotations

from typing import Any

from router.http.exchange import HttpExchange
from tests.router.ends import ended
from tests.router.http.asgi_wire import Wire, scope
from tests.router.http.scripted import Core, started
from wire.errors import ErrorCode, WireError
from wire.payloads import PrefillResult, Usage


def exchange(wire: Wire, **more: Any) -> HttpExchange:
    return HttpExchange(scope() | more, wire.receive, wire.send, "id-1", 0.0)


async def test_every_response_echoes_the_request_id() -> None:
    wire = Wire()
    subject = exchange(wire)
    await subject.reply({"a": 1}, 503, (b"retry-after", b"1"))
    headers = dict(wire.sent[0]["headers"])
    assert (headers[b"x-request-id"], headers[b"retry-after"]) == (b"id-1", b"1")
    assert (subject.status, wire.sent[1]["body"]) == (503, b'{"a":1}')


def test_the_client_is_an_address_or_nothing() -> None:
    assert exchange(Wire(), client=("10.0.0.1", 5)).client == "10.0.0.1"
    assert exchange(Wire(), client=None).client == ""


def test_who_asks_is_the_key_or_else_the_address() -> None:
    subject = exchange(Wire(), client=("10.0.0.1", 5))
    assert subject.context == "10.0.0.1"
    subject.key_name = "key-0123456789ab"
    assert subject.context == "key-0123456789ab"


def test_what_a_completion_came_to() -> None:
    core, subject = Core(), exchange(Wire())
    completion, _ = started(core, 1)
    core.sinks[0].on_prefill(PrefillResult(token_id=5, cached_tokens=2), 0)
    core.sinks[0].on_end(
        ended(
            "length",
            prompt_tokens=3,
            cached_tokens=2,
            completion_tokens=1,
            kv_bytes=64,
            queue_s=None,
            num_attempts=2,
        )
    )
    core.sinks[0].on_done(Usage(finish_reason="length", kv_bytes=64))
    completion.take()
    subject.note(completion)
    assert subject.outcome == "length"
    assert subject.facts == {
        "choices": 1,
        "attempts": 2,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "completion_tokens": 1,
        "kv_bytes": 64,
        "kv_skipped_tokens": 0,
    }


def test_an_error_in_the_middle_is_the_outcome() -> None:
    core, subject = Core(), exchange(Wire())
    completion, _ = started(core, 1)
    core.sinks[0].on_error(WireError(ErrorCode.TRANSFER_FAILED, "x"))
    completion.take()
    subject.note(completion)
    assert subject.outcome == "transfer_failed"
