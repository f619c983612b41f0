"""Writes the answer to one HTTP client, as a stream or whole.

The response begins with the first thing to say, so whatever goes wrong before the first token still
has an HTTP status of its own.  A client that leaves is noticed while nothing is written; one that
stays but does not read is cut off, by the server or because too many tokens pile up.

Tokens are the router's bulk, so they are written without a task waking up for them: all writers
with something to write have their turn in one pass (`wire.aio.fair_writes`), and what a server
takes at once costs one call.  The first of an answer alone is written where it comes in: somebody
waits for it.  Only where the server does not take it all, because the client is slow to read, does
the task of the request wait for it; meanwhile its tokens pile up, and go out together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from router.api.completions.completion import Choice, Completion
from router.api.completions.deltas import Delta, joined
from router.api.completions.events import HEADERS
from router.api.completions.response import Answer
from router.api.errors import Header, http_error
from router.http.asgi import Disconnected, Push, Receive, Send
from router.http.eager import go_on
from router.http.token_events import TokenEvents
from wire.aio.fair_writes import FairWrites

# Silence after which a comment is sent; proxies tend to give up at 30 or 60 s.
PING_S: Final = 10.0


class ResponseWriter:
    """Sends the answer to one HTTP request.

    `cut_off` is called once, when too much waits for the client; it must end the write under way.
    `on_tokens` is told the time since the tokens before and the number of the new ones, where the
    request has one choice.  `find_push` gives the server's way past ASGI, if it has one, for what
    comes between the first and the last events: a call that says whether it could take a piece of
    the body at once.
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
        # The way past ASGI, while there is one.
        self._push: Push | None = None
        self._headers = [*HEADERS, *headers]
        self._clock = clock
        self._cut_off = cut_off
        self._on_tokens = on_tokens

        self.is_started = False
        self.is_gone = False

        self._streamed: tuple[Completion, Answer] | None = None
        # What writes instead of this while there is but text.
        self._middle: TokenEvents | None = None
        # What `prepare` does: nothing before somebody waits in `stream` or `collect`, or after.
        self._advance: Callable[[float], bytes] | None = None
        # Whoever waits there; woken by the end, an error, and a write that is not taken at once.
        self._signal = asyncio.Event()
        self._error: Exception | None = None
        # What is left of such a write.
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
        """The client is gone."""
        self.is_gone = True
        self._end_middle()
        self._signal.set()

    def tick(self) -> None:
        """Keep a silent stream alive; call it about once a second."""
        last = self._middle.last if self._middle else self._last_write
        if self._rest is None and self._clock() - last >= PING_S:
            self._end_middle()
            self._is_ping_due = True
            self.wake()

    def prepare(self, now: float) -> bytes:
        """Take what has come, and return what is to be sent of it now."""
        if self._advance is None or self._rest is not None or self.is_gone:
            return b""
        try:
            return self._advance(now)
        except Exception as error:
            self.fail(error)
            return b""

    def transmit(self, body: bytes) -> None:
        """Send as far as the server takes it at once, which is mostly all; the task of the request
        waits for the rest."""
        if self._push is not None and self._push(body):
            self._begin_middle()
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
            self._rest = go_on(sending, awaited)
            self._signal.set()

    def fail(self, error: Exception) -> None:
        self._error, self._advance = error, None
        self._signal.set()

    def _begin_middle(self) -> None:
        """Have the text that follows written without us, if text is all there is."""
        if self._streamed is None or self._push is None or self._last_tokens is None:
            return
        completion, answer = self._streamed
        if answer.usual is not None and completion.choices[0].num_lendable > 0:
            self._middle = TokenEvents(
                self,
                self._turns,
                completion.choices[0],
                answer.usual,
                self._push,
                self._on_tokens,
                self._last_tokens,
            )

    def _end_middle(self) -> None:
        if self._middle is not None:
            self._middle.end()

    # The request's own task.

    async def stream(self, completion: Completion, answer: Answer) -> None:
        """Write events until the completion is over.

        Raises:
            Disconnected: The client is gone.
            HttpError: It failed before anything was written.
        """
        self._is_timed = len(completion.choices) == 1
        self._streamed = completion, answer
        await self._until_over(completion, self._write_events)

    async def collect(self, completion: Completion) -> list[Delta]:
        """Wait for the end and return each choice whole.

        Raises:
            Disconnected: The client is gone.
            HttpError: It failed.
        """
        pieces: dict[Choice, list[Delta]] = {choice: [] for choice in completion.choices}
        await self._until_over(completion, partial(self._collect, completion, pieces))
        return [joined(each) for each in pieces.values()]

    async def _until_over(self, completion: Completion, advance: Callable[[float], bytes]) -> None:
        self._advance = advance
        self.wake()  # something may have come already
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
        """No circle is left: it would wait for the garbage collector, which stops everybody for as
        long as many requests have ended."""
        self._end_middle()
        self._advance = self._streamed = self._middle = self._error = self._rest = None

    def _write_events(self, now: float) -> bytes:
        assert self._streamed is not None
        completion, answer = self._streamed
        body, num_new_tokens = b"", 0
        if (middle := self._middle) is not None:
            middle.end()
            body, num_new_tokens = middle.take()
            self._last_write = self._last_tokens = middle.last
            self._middle = None
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


async def wait_for_disconnect(receive: Receive, writer: ResponseWriter) -> None:
    """Tell `writer` when the client leaves; the body must have been read whole."""
    while (await receive())["type"] != "http.disconnect":
        pass
    writer.disconnect()
