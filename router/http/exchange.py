"""One HTTP request on its way through the HTTP application, and what its log line will say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.http import asgi
from router.http.asgi import Header, Receive, Scope, Send
from router.http.completion import Completion
from router.http.writer import ResponseWriter
from router.log import facts


@dataclass(eq=False, slots=True)
class HttpExchange:
    """An ASGI request; `started_at` is on the monotonic clock, `writer` is there once it runs.

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
    # Nothing more of the body will come.
    is_body_read: bool = False
    # What lets a web page that is allowed to ask read the answer.
    cors: tuple[Header, ...] = ()
    writer: ResponseWriter | None = None
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
    def context(self) -> str:
        """Who has one turn among all that wait: a key, from wherever it is used, or an address."""
        return self.key_name or self.client

    async def respond(
        self, status: int, body: bytes, *headers: Header, content_type: bytes = asgi.JSON
    ) -> None:
        """Send a whole response."""
        self.status = status
        named = {name: (name, value) for name, value in (*self.headers, *headers)}
        if not self.is_body_read and asgi.has_body(self.scope):
            # The server hangs up on a body that nobody reads: the client must not ask here again.
            named |= {b"connection": (b"connection", b"close")}
        all_headers = tuple(named.values())
        await asgi.respond(self.send, status, body, content_type=content_type, headers=all_headers)

    async def reply(self, body: object, status: int = 200, *headers: Header) -> None:
        """Send a whole response of JSON."""
        await self.respond(status, msgspec.json.encode(body), *headers)

    def note(self, completion: Completion) -> None:
        """Take down what a completion came to."""
        reasons = {choice.finish_reason for choice in completion.choices} - {None}
        if completion.error is not None:
            self.outcome = completion.error.code.label
        elif reasons:
            self.outcome = str(min(reasons, key=str))
        ends = [choice.end for choice in completion.choices if choice.end is not None]
        self.facts |= {"choices": len(completion.choices), **facts(ends)}


Handler = Callable[[HttpExchange], Awaitable[None]]
