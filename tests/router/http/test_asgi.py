"""HTTP without a server: error bodies, statuses, headers, bodies with a cap."""

from __future__ import annotations

import json

import pytest

from router.http import asgi
from router.http.asgi import HttpError, http_error
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


@pytest.mark.parametrize("kind", [b"application/json", b"Application/JSON; charset=utf-8"])
def test_json_that_says_so(kind: bytes) -> None:
    asgi.check_content_type(scope((b"content-type", kind)))


def test_a_body_that_says_nothing_is_told_what_to_say() -> None:
    """A web page may send it to anybody without asking first."""
    with pytest.raises(HttpError, match="curl: -H 'content-type: application/json'") as caught:
        asgi.check_content_type(scope())
    assert caught.value.status == 415


@pytest.mark.parametrize(
    "header",
    [
        (b"content-type", b"application/x-www-form-urlencoded"),
        (b"content-type", b"text/plain"),
        (b"content-encoding", b"gzip"),
    ],
)
def test_other_types_are_415(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(HttpError) as caught:
        asgi.check_content_type(scope(header, (b"content-type", b"application/json")))
    assert caught.value.status == 415


async def test_a_body_in_pieces() -> None:
    wire = Wire(
        [
            {"type": "http.request", "body": b"ab", "more_body": True},
            {"type": "http.request", "body": b"c"},
        ]
    )
    assert await asgi.read_body(scope(), wire.receive) == b"abc"


async def test_a_client_that_leaves_before_the_end() -> None:
    wire = Wire(
        [{"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.disconnect"}]
    )
    assert await asgi.read_body(scope(), wire.receive) is None


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    with pytest.raises(HttpError, match="limit of 9 bytes") as caught:
        await asgi.read_body(scope((b"content-length", b"10")), Wire().receive, 9)
    assert caught.value.status == 413
    assert caught.value.headers == ((b"connection", b"close"),)


async def test_a_body_that_grows_too_large_is_left() -> None:
    pieces = [{"type": "http.request", "body": b"x" * 6, "more_body": True}] * 3
    wire = Wire(pieces)
    with pytest.raises(HttpError):
        await asgi.read_body(scope((b"content-length", b"lies")), wire.receive, 9)
    assert len(wire.incoming) == 1


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


def test_a_server_without_a_transport_cannot_be_aborted() -> None:
    assert not asgi.abort(Wire().send)
