"""Writes the answer to one HTTP client, as a stream or whole, and cuts one that does not read.

The response begins with the first thing to say, so whatever goes wrong before the first token still
has an HTTP status of its own.  A client that leaves is noticed while nothing is written; one that
stays but does not read is cut off, by `tick` or by the tokens that pile up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from router.api.answered.completion import Answer, Choice, Completion
from router.api.answered.events import HEADERS
from router.api.answered.pieces import Piece, joined
from router.api.errors import Header, http_error
from router.http.asgi import Disconnected, Receive, Send

# Silence after which a comment is sent; proxies tend to give up at 30 or 60 s.
PING_S: Final = 10.0
# A write that takes longer than this has a client that does not read.
STALL_S: Final = 10.0


class ResponseWriter:
    """Sends the answer to one HTTP request.

    `cut_off` is called once when the client does not read; it must interrupt the write under way.
    `on_tokens` is told the time since the tokens before and the number of the new ones, where the
    request has one choice.
    """

    def __init__(
        self,
        send: Send,
        *,
        headers: tuple[Header, ...],
        clock: Callable[[], float],
        cut_off: Callable[[], object],
        on_tokens: Callable[[float, int], None],
    ) -> None:
        self._send = send
        self._headers = [*HEADERS, *headers]
        self._signal = _Signal()
        self._clock = clock
        self._cut_off = cut_off
        self._on_tokens = on_tokens

        self.is_started = False
        self.is_gone = False
        self.is_cut = False
        self.first_token_at: float | None = None

        self._writing_since: float | None = None
        self._is_ping_due = False
        self._last_write = clock()
        self._last_tokens = 0.0

    # Called from outside while `stream` or `collect` waits.

    def wake(self) -> None:
        self._signal.set()

    def overrun(self) -> None:
        if self._writing_since is not None:
            self._cut()

    def disconnect(self) -> None:
        """The client is gone."""
        self.is_gone = True
        self._signal.set()

    def tick(self) -> None:
        """Keep a silent stream alive and end a stalled one; call it about once a second."""
        now = self._clock()
        if self._writing_since is not None:
            if now - self._writing_since > STALL_S:
                self._cut()
        elif now - self._last_write >= PING_S:
            self._is_ping_due = True
            self._signal.set()

    # The writer.

    async def stream(self, completion: Completion, answer: Answer) -> None:
        """Write events until the completion is over.

        Raises:
            Disconnected: The client is gone.
            HttpError: It failed before anything was written.
        """
        while not completion.is_over:
            await self._wait()
            body = answer.take()
            self._note_tokens(completion)
            if completion.error is not None:
                error = http_error(completion.error)
                if not self.is_started:
                    raise error
                body += answer.failure(error)
            elif completion.is_over:
                body += answer.end()
            elif not body and self._is_ping_due:
                body = answer.ping
            if body:
                await self._write(body, is_last=completion.is_over)

    async def collect(self, completion: Completion) -> list[Piece]:
        """Wait for the end and return each choice whole.

        Raises:
            Disconnected: The client is gone.
            HttpError: It failed.
        """
        pieces: dict[Choice, list[Piece]] = {choice: [] for choice in completion.choices}
        while not completion.is_over:
            await self._wait()
            for choice, taken in completion.take():
                pieces[choice] += taken
        if completion.error is not None:
            raise http_error(completion.error)
        return [joined(each) for each in pieces.values()]

    async def _wait(self) -> None:
        await self._signal.wait()
        if self.is_gone:
            raise Disconnected

    async def _write(self, body: bytes, *, is_last: bool) -> None:
        self._writing_since = self._last_write = self._clock()
        self._is_ping_due = False
        if not self.is_started:
            self.is_started = True
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._writing_since = None

    def _note_tokens(self, completion: Completion) -> None:
        num_tokens = completion.num_new_tokens
        if not num_tokens:
            return
        now = self._clock()
        if self.first_token_at is None:
            self.first_token_at = now
        elif len(completion.choices) == 1:
            self._on_tokens(now - self._last_tokens, num_tokens)
        self._last_tokens = now

    def _cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            self._cut_off()
            self.disconnect()


async def wait_for_disconnect(receive: Receive, writer: ResponseWriter) -> None:
    """Tell `writer` when the client leaves; the body must have been read whole."""
    while (await receive())["type"] != "http.disconnect":
        pass
    writer.disconnect()


class _Signal:
    """Like `asyncio.Event`, for one waiter, and cleared by waiting; it takes half the time."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        if self._is_set:
            await asyncio.sleep(0)  # where there is always more to write, others need a turn too
        else:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_set = False
