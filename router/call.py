"""One HTTP request on its way through the gateway, and what its log line will say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router import http
from router.delivery import Delivery
from router.exchange import Exchange
from router.http import Header, Receive, Scope, Send
from router.journal import facts


@dataclass(eq=False, slots=True)
class Call:
    """An ASGI request; `started_at` is on the monotonic clock, `delivery` is there once it runs.

    `key_name` is that of its API key, where there are keys.
    """

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    started_at: float
    endpoint: str = "unknown"
    status: int = 200
    outcome: str = "ok"
    key_name: str = ""
    # What lets a web page that is allowed to ask read the answer.
    cors: tuple[Header, ...] = ()
    delivery: Delivery | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> tuple[Header, ...]:
        """Headers of every response."""
        return ((b"x-request-id", self.request_id.encode()), *self.cors)

    @property
    def client(self) -> str:
        """The address of the other end, empty when the server does not say."""
        address = self.scope.get("client")
        return address[0] if address else ""

    @property
    def asker(self) -> str:
        """Who has one turn among all that wait: a key, from wherever it is used, or an address."""
        return self.key_name or self.client

    async def respond(
        self, status: int, body: bytes, *headers: Header, content_type: bytes = http.JSON
    ) -> None:
        """Send a whole response."""
        self.status = status
        await http.respond(
            self.send, status, body, content_type=content_type, headers=(*self.headers, *headers)
        )

    async def reply(self, body: object, status: int = 200, *headers: Header) -> None:
        """Send a whole response of JSON."""
        await self.respond(status, msgspec.json.encode(body), *headers)

    def note(self, exchange: Exchange) -> None:
        """Take down what a completion came to."""
        reasons = {choice.finish_reason for choice in exchange.choices} - {None}
        if exchange.error is not None:
            self.outcome = exchange.error.code.label
        elif reasons:
            self.outcome = str(min(reasons, key=str))
        ends = [choice.end for choice in exchange.choices if choice.end is not None]
        self.facts |= {"choices": len(exchange.choices), **facts(ends)}


Handler = Callable[[Call], Awaitable[None]]
