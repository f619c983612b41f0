"""One HTTP request without a server: error bodies, statuses, headers, and who asks."""

from __future__ import annotations

from typing import Any

import pytest

from router.http import asgi
from router.http.asgi import HttpExchange
from tests.router.http.asgi_wire import Wire, scope


@pytest.mark.parametrize(
    "given", [b"", b"a b", b"a\nb", b"x" * 129, "é".encode(), b'"', b"a;b", b"%0a"]
)
def test_a_request_id_that_could_spoil_a_log_is_replaced(given: bytes) -> None:
    assert asgi.request_id(scope((b"x-request-id", given)), "fresh") == "fresh"


def test_a_good_request_id_is_kept() -> None:
    assert asgi.request_id(scope((b"x-request-id", b"req_1.2-3:4/=")), "fresh") == "req_1.2-3:4/="
    assert asgi.request_id(scope(), "fresh") == "fresh"


PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LATER = b"cc" + PARENT[2:]


@pytest.mark.parametrize(
    ("headers", "kept"),
    [
        ([(b"traceparent", PARENT)], {"traceparent": PARENT}),
        ([(b"traceparent", LATER + b"-more")], {"traceparent": LATER}),
        (
            [(b"traceparent", PARENT), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")],
            {"traceparent": PARENT, "tracestate": b"a=1,b=2"},
        ),
        ([(b"traceparent", PARENT), (b"tracestate", b"a=" + b"x" * 511)], {"traceparent": PARENT}),
        ([(b"traceparent", PARENT), (b"tracestate", b"a=\x1b[2J")], {"traceparent": PARENT}),
        ([(b"tracestate", b"a=1")], {}),
        ([(b"traceparent", PARENT), (b"traceparent", PARENT)], {}),
        *(
            ([(b"traceparent", wrong)], {})
            for wrong in (
                b"",
                PARENT.upper(),
                PARENT[:-1],
                PARENT + b"-more",
                b"ff" + PARENT[2:],
                PARENT.replace(b"4bf92f3577b34da6a3ce929d0e0e4736", b"0" * 32),
                PARENT.replace(b"00f067aa0ba902b7", b"0" * 16),
                LATER + b"more",
                LATER + b"-\x00",
            )
        ),
    ],
)
def test_a_trace_is_kept_if_it_is_one(
    headers: list[tuple[bytes, bytes]], kept: dict[str, bytes]
) -> None:
    assert asgi.trace(scope(*headers)) == {name: kept[name].decode() for name in kept}


def exchange(wire: Wire, **more: Any) -> HttpExchange:
    return HttpExchange(scope() | more, wire.receive, wire.send, "id-1", 0.0)


async def test_every_response_echoes_the_request_id() -> None:
    wire = Wire()
    subject = exchange(wire)
    await subject.reply({"a": 1}, 503, (b"retry-after", b"1"))
    headers = dict(wire.sent[0]["headers"])
    assert (headers[b"x-request-id"], headers[b"retry-after"]) == (b"id-1", b"1")
    assert (subject.status, wire.sent[1]["body"]) == (503, b'{"a":1}')


def test_the_asker_is_the_key_or_the_address() -> None:
    subject = exchange(Wire(), client=("10.0.0.1", 5))
    assert subject.client_id == "10.0.0.1"
    subject.key_name = "key-0123456789ab"
    assert subject.client_id == "key-0123456789ab"
