"""Writes the response to one HTTP client, as a stream or whole.

The response starts with the first event, so an error before the first token still has its own HTTP
status.  A slow reader is cut off, by the server or when too many tokens pile up.

No task wakes up for a token: all writers with pending tokens run in one pass
(`wire.aio.fair_writes`).  Only the first token of a response is written where it comes in.  If the
server cannot take a write at once, because the client is slow to read, the task of the request
waits for it, and the tokens that come meanwhile go out together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from router.api.completions.completion import Choice, Completion
from router.api.completions.deltas import Delta, joined
from router.api.completions.response import HEADERS, Answer
from router.api.errors import Header, http_error
from router.http.asgi import Disconnected, Push, Send, resume
from router.http.token_events import TokenEvents
from wire.aio.fair_writes import FairWrites

# Silence after which a comment is sent; proxies tend to give up at 30 or 60 s.
PING_S: Final = 10.0


class ResponseWriter:
    """Sends the response to one HTTP request.

    Args:
        find_push: Returns the server's function that bypasses ASGI, if it has one: it says whether
            it could take a part of the body at once.
        cut_off: Called once when too much waits for the client; must end the write under way.
        on_tokens: Gets the time since the last tokens and the number of new ones, for requests with
            one choice.
    """

    def __init__(
        self,
        send: Send,
        turns: FairWrites,
        *,
        find_push: Callable[[Send], Push | None] = lambda send: None,
        headers: tuple[Header, ...],
        clock: Callable[[], float],
        cut_off: Callable[[], object],
        on_tokens: Callable[[float, int], None],
    ) -> None:
        self._send = send
        self._turns = turns
        self._find_push = find_push
        self._push: Push | None = None
        self._headers = [*HEADERS, *headers]
        self._clock = clock
        self._cut_off = cut_off
        self._on_tokens = on_tokens

        self.is_started = False
        self.is_gone = False

        self._streamed: tuple[Completion, Answer] | None = None
        # Writes in place of this object while there is only text.
        self._fast_path: TokenEvents | None = None
        # The body of `prepare`; None while no task is in `stream` or `collect`.
        self._advance: Callable[[float], bytes] | None = None
        # Wakes that task at the end, at an error, and for a write that was not taken at once.
        self._signal = asyncio.Event()
        self._error: Exception | None = None
        # The rest of such a write.
        self._rest: Awaitable[None] | None = None
        self._is_ping_due = False
        self._last_write = clock()
        self._last_tokens: float | None = None
        self._is_timed = False

    # Called from outside while `stream` or `collect` waits.

    def wake(self) -> None:
        self._turns.take(self)

    def write(self) -> None:
        if body := self.prepare(self._clock()):
            self.transmit(body)

    def overrun(self) -> None:
        if self._rest is not None and not self.is_gone:
            self._cut_off()
            self.disconnect()

    def disconnect(self) -> None:
        """Stop: the client has left."""
        self.is_gone = True
        self._end_fast_path()
        self._signal.set()

    def tick(self) -> None:
        """Keep a silent stream alive; call it about once a second."""
        last = self._fast_path.last if self._fast_path else self._last_write
        if self._rest is None and self._clock() - last >= PING_S:
            self._end_fast_path()
            self._is_ping_due = True
            self.wake()

    def prepare(self, now: float) -> bytes:
        """Return the bytes to send now."""
        if self._advance is None or self._rest is not None or self.is_gone:
            return b""
        try:
            return self._advance(now)
        except Exception as error:
            self.fail(error)
            return b""

    def transmit(self, body: bytes) -> None:
        """Send what the server takes at once, mostly all; the request's task sends the rest."""
        if self._push is not None and self._push(body):
            self._start_fast_path()
            return
        is_last = self._advance is None
        sending = self._send_events(body, is_last=is_last)
        try:
            awaited = sending.send(None)
        except StopIteration:
            if is_last:
                self._signal.set()
        except Exception as error:
            self.fail(error)
        else:
            self._rest = resume(sending, awaited)
            self._signal.set()

    def fail(self, error: Exception) -> None:
        self._error, self._advance = error, None
        self._signal.set()

    def _start_fast_path(self) -> None:
        """Switch to the fast path if the stream has only text."""
        if self._streamed is None or self._push is None or self._last_tokens is None:
            return
        completion, answer = self._streamed
        if answer.usual is not None and completion.choices[0].num_divertible > 0:
            self._fast_path = TokenEvents(
                self,
                self._turns,
                completion.choices[0],
                answer.usual,
                self._push,
                self._on_tokens,
                self._last_tokens,
            )

    def _end_fast_path(self) -> None:
        if self._fast_path is not None:
            self._fast_path.end()

    # The request's own task.

    async def stream(self, completion: Completion, answer: Answer) -> None:
        """Write events until the completion is over.

        Raises:
            Disconnected: The client left.
            HttpError: The request failed before anything was written.
        """
        self._is_timed = len(completion.choices) == 1
        self._streamed = completion, answer
        await self._until_over(completion, self._write_events)

    async def collect(self, completion: Completion) -> list[Delta]:
        """Wait for the end and return each choice whole.

        Raises:
            Disconnected: The client left.
            HttpError: The request failed.
        """
        pieces: dict[Choice, list[Delta]] = {choice: [] for choice in completion.choices}
        await self._until_over(completion, partial(self._collect, completion, pieces))
        return [joined(each) for each in pieces.values()]

    async def _until_over(self, completion: Completion, advance: Callable[[float], bytes]) -> None:
        self._advance = advance
        self.wake()  # tokens may have come already
        try:
            while not completion.is_over:
                await self._signal.wait()
                self._signal.clear()
                if self._error is not None:
                    raise self._error
                if self._rest is not None:
                    await self._rest
                    self._rest = None
                    self.wake()
                if self.is_gone and not completion.is_over:
                    raise Disconnected
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Break reference cycles, which would make the garbage collector stop the whole router."""
        self._end_fast_path()
        self._advance = self._streamed = self._fast_path = self._error = self._rest = None

    def _write_events(self, now: float) -> bytes:
        assert self._streamed is not None
        completion, answer = self._streamed
        body, num_new_tokens = b"", 0
        if (fast_path := self._fast_path) is not None:
            fast_path.end()
            body, num_new_tokens = fast_path.take()
            self._last_write = self._last_tokens = fast_path.last
            self._fast_path = None
        body += answer.take()
        if num_new_tokens := num_new_tokens + completion.num_new_tokens:
            if self._last_tokens is not None and self._is_timed:
                self._on_tokens(now - self._last_tokens, num_new_tokens)
            self._last_tokens = now
        if completion.is_over:
            self._advance = self._push = None
            if completion.error is None:
                body += answer.end()
            elif self.is_started:
                body += answer.failure(http_error(completion.error))
            else:
                raise http_error(completion.error)
        elif not body and self._is_ping_due:
            body = answer.ping
        if body:
            self._last_write = now
            self._is_ping_due = False
        return body

    def _collect(
        self, completion: Completion, pieces: dict[Choice, list[Delta]], now: float
    ) -> bytes:
        for choice, taken in completion.take():
            pieces[choice] += taken
        if completion.error is not None:
            raise http_error(completion.error)
        if completion.is_over:
            self._advance = None
            self._signal.set()
        return b""

    async def _send_events(self, body: bytes, *, is_last: bool) -> None:
        if not self.is_started:
            self.is_started = True
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        if self._push is None and not is_last:
            self._push = self._find_push(self._send)
