"""Writes the response to one HTTP client, as a stream or whole.

The response starts with the first event, so an error before the first token still has its own HTTP
status.  A slow reader is disconnected, by the server or when too many tokens are pending.

No task wakes up for a token: all writers with pending tokens run in one pass
(`wire.aio.fair_writes`).  Only the first token of a response is written immediately.  If a write
would block, because the client reads too slowly, the task of the request waits for it, and the
tokens that arrive meanwhile are then sent together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from router.api.completions.completion import Choice, Completion
from router.api.completions.deltas import Delta, joined
from router.api.completions.response import HEADERS, Answer
from router.api.errors import Header, http_error
from router.http.asgi import Disconnected, Push, Send, resume
from router.http.token_events import TokenEvents
from wire.aio.fair_writes import FairWrites

# A comment is sent on a stream that is idle this long; proxies tend to time out at 30 or 60 s.
PING_S: Final = 10.0


@dataclass(eq=False, repr=False)
class ResponseWriter:
    """Sends the response to one HTTP request.

    Args:
        fair_writes: Schedules the writers of all responses.
        find_push: Returns the server's function for writing without ASGI, or None; see `Push`.
        cut_off: Called once when too many tokens are pending; must abort the write in progress.
        on_tokens: Called with the time since the last tokens and the number of new ones, for
            requests with one choice.
    """

    send: Send
    fair_writes: FairWrites
    headers: tuple[Header, ...]
    clock: Callable[[], float]
    cut_off: Callable[[], object]
    on_tokens: Callable[[float, int], None]
    find_push: Callable[[Send], Push | None] = lambda send: None

    is_started: bool = False
    is_disconnected: bool = False

    _push: Push | None = None
    _streamed: tuple[Completion, Answer] | None = None
    # Writes in place of this object while events contain only text.
    _fast_path: TokenEvents | None = None
    # Does the work of `prepare`; None unless a task is waiting in `stream` or `collect`.
    _advance: Callable[[float], bytes] | None = None
    # Wakes that task at the end, at an error, and if a write would block.
    _signal: asyncio.Event = field(default_factory=asyncio.Event)
    _error: Exception | None = None
    # The rest of the write that would block.
    _rest: Awaitable[None] | None = None
    _is_ping_due: bool = False
    _last_tokens: float | None = None
    _is_timed: bool = False

    def __post_init__(self) -> None:
        self._last_write = self.clock()

    # Called by others while `stream` or `collect` waits.

    def wake(self) -> None:
        """Schedule a write of the pending tokens in this iteration of the event loop."""
        self.fair_writes.take(self)

    def write(self) -> None:
        """Write the pending tokens now."""
        if body := self.prepare(self.clock()):
            self.transmit(body)

    def overrun(self) -> None:
        """Disconnect a slow reader: too many tokens are pending."""
        if self._rest is not None and not self.is_disconnected:
            self.cut_off()
            self.disconnect()

    def disconnect(self) -> None:
        """Stop writing: the client has disconnected."""
        self.is_disconnected = True
        self._end_fast_path()
        self._signal.set()

    def tick(self) -> None:
        """Send a comment if the stream is idle.  Call it about once a second."""
        last = self._fast_path.last if self._fast_path else self._last_write
        if self._rest is None and self.clock() - last >= PING_S:
            self._end_fast_path()
            self._is_ping_due = True
            self.wake()

    def prepare(self, now: float) -> bytes:
        """Return the bytes to send now; see `wire.aio.fair_writes.Writer`."""
        if self._advance is None or self._rest is not None or self.is_disconnected:
            return b""
        try:
            return self._advance(now)
        except Exception as error:
            self.fail(error)
            return b""

    def transmit(self, body: bytes) -> None:
        """Send as much as does not block, mostly all; the request's task sends the rest."""
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
        """Switch to the fast path if events contain only text."""
        if self._streamed is None or self._push is None or self._last_tokens is None:
            return
        completion, answer = self._streamed
        if answer.usual is not None and completion.choices[0].num_divertible > 0:
            self._fast_path = TokenEvents(
                self,
                self.fair_writes,
                completion.choices[0],
                answer.usual,
                self._push,
                self.on_tokens,
                self._last_tokens,
            )

    def _end_fast_path(self) -> None:
        if self._fast_path is not None:
            self._fast_path.end()

    # The request's own task.

    async def stream(self, completion: Completion, answer: Answer) -> None:
        """Write events until the completion has ended.

        Raises:
            Disconnected: The client disconnected.
            HttpError: The request failed before anything was written.
        """
        self._is_timed = len(completion.choices) == 1
        self._streamed = completion, answer
        await self._until_over(completion, self._write_events)

    async def collect(self, completion: Completion) -> list[Delta]:
        """Wait for the end of the completion and return one merged delta per choice.

        Raises:
            Disconnected: The client disconnected.
            HttpError: The request failed.
        """
        deltas: dict[Choice, list[Delta]] = {choice: [] for choice in completion.choices}
        await self._until_over(completion, partial(self._collect, completion, deltas))
        return [joined(each) for each in deltas.values()]

    async def _until_over(self, completion: Completion, advance: Callable[[float], bytes]) -> None:
        """Let `advance` produce the bytes of each write until the completion has ended."""
        self._advance = advance
        self.wake()  # some tokens may be pending already
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
                if self.is_disconnected and not completion.is_over:
                    raise Disconnected
        finally:
            self._break_cycles()

    def _break_cycles(self) -> None:
        """Break reference cycles: collecting them as garbage would pause the whole router."""
        self._end_fast_path()
        self._advance = self._streamed = self._fast_path = self._error = self._rest = None

    def _write_events(self, now: float) -> bytes:
        """Return the new events of a stream, including the closing ones at its end."""
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
                self.on_tokens(now - self._last_tokens, num_new_tokens)
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
        self, completion: Completion, deltas: dict[Choice, list[Delta]], now: float
    ) -> bytes:
        """Store new deltas; return no bytes, since the response is sent whole."""
        for choice, taken in completion.take():
            deltas[choice] += taken
        if completion.error is not None:
            raise http_error(completion.error)
        if completion.is_over:
            self._advance = None
            self._signal.set()
        return b""

    async def _send_events(self, body: bytes, *, is_last: bool) -> None:
        if not self.is_started:
            self.is_started = True
            start = {
                "type": "http.response.start",
                "status": 200,
                "headers": [*HEADERS, *self.headers],
            }
            await self.send(start)
        await self.send({"type": "http.response.body", "body": body, "more_body": not is_last})
        if self._push is None and not is_last:
            self._push = self.find_push(self.send)
