"""One HTTP request without a server: error bodies, statuses, headers, and who asks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.http import asgi
from router.http.asgi import HttpExchange, http_error
from tests.router.http.asgi_wire import Wire, scope
from wire.errors import ErrorCode, TransferTooLarge, WireError


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_status_and_a_word(code: ErrorCode) -> None:
    error = http_error(WireError(code, "what happened"))
    body = json.loads(error.body)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == code.label
    assert error.status in (400, 401, 404, 408, 429, 500, 503)
    names = [name for name, _ in error.headers]
    assert (b"retry-after" in names) == (error.status in (429, 503))


def test_the_status_of_each_failure() -> None:
    assert http_error(TransferTooLarge(9, 5)).status == 400
    assert http_error(WireError(ErrorCode.OVERLOADED, "")).status == 429
    assert http_error(WireError(ErrorCode.NO_WORKER, "")).status == 503
    assert http_error(WireError(ErrorCode.DEADLINE_EXCEEDED, "")).headers == (
        (b"x-should-retry", b"false"),
    )


def test_nobody_is_to_ask_again_what_the_model_cannot_answer() -> None:
    error = http_error(WireError(ErrorCode.MODEL_FAILED, "KeyError: '/home/me/secret'"))
    assert (error.status, error.code) == (500, "model_failed")
    assert error.headers == ((b"x-should-retry", b"false"),)
    assert error.message == "the request failed: model_failed"


def test_words_of_our_own_faults_stay_in_the_log() -> None:
    error = http_error(WireError(ErrorCode.PROTOCOL, "decode-3 said /etc/secret"))
    assert error.status == 500
    assert "secret" not in error.body.decode()


@pytest.mark.parametrize(
    "given", [b"", b"a b", b"a\nb", b"x" * 129, "é".encode(), b'"', b"a;b", b"%0a"]
)
def test_a_request_id_that_could_spoil_a_log_is_replaced(given: bytes) -> None:
    assert asgi.request_id(scope((b"x-request-id", given)), "fresh") == "fresh"


def test_a_good_request_id_is_kept() -> None:
    assert asgi.request_id(scope((b"x-request-id", b"req_1.2-3:4/=")), "fresh") == "req_1.2-3:4/="
    assert asgi.request_id(scope(), "fresh") == "fresh"


async def test_a_response() -> None:
    wire = Wire()
    await asgi.respond(wire.send, 201, b"hi", headers=((b"a", b"b"),))
    start, body = wire.sent
    assert start["status"] == 201
    assert dict(start["headers"])[b"content-length"] == b"2"
    assert (b"a", b"b") in start["headers"]
    assert body["body"] == b"hi"


async def test_the_servers_start_and_stop() -> None:
    wire = Wire([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    await asgi.lifespan(wire.receive, wire.send)
    assert [event["type"] for event in wire.sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


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
    assert subject.asker == "10.0.0.1"
    subject.key_name = "key-0123456789ab"
    assert subject.asker == "key-0123456789ab"
