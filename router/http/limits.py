"""Limits on request bodies: their size, transfer rate, and processing time on the event loop.

A body must be JSON, small enough (also when decompressed) and fast enough.  The bodies of all
requests together have a limit too.  A body that exceeds it is refused at once instead of queued,
because a waiting client uses memory, perhaps on purpose.  Large bodies and large responses are
processed in a few threads, which are shared fairly between clients (`wire.process.fair_threads`).
Ordinary bodies have threads of their own, so that they do not wait for the largest bodies.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from router.api.errors import HttpError
from router.http.asgi import JSON, Disconnected, HttpExchange, Receive, Scope, find_header, resume
from router.http.compression import STEP_BYTES, Inflation
from wire.aio.listener import LAST_LOOK_S
from wire.errors import ErrorCode, WireError
from wire.process.fair_queue import FairQueue
from wire.process.fair_threads import FairThreads

# About half a million tokens as text, or 300,000 as decimal ids.  Parsing JSON and freeing the
# result of the tokenizer hold the GIL: for 4 MB, longer than other requests should wait.
MAX_BODY_BYTES: Final = 2 * 1024 * 1024
# The minimum transfer rate of a body after the grace period; slower is an attack or a broken link.
BODY_BYTES_PER_S: Final = 64 * 1024
MAX_TOTAL_BYTES: Final = 256 * 1024 * 1024

# Bodies up to this size are processed on the event loop, which takes about a millisecond.
INLINE_BYTES: Final = 16 * 1024
# Bodies up to this size take some ten milliseconds, larger ones far longer.
ORDINARY_BYTES: Final = 128 * 1024
# One client may use all of these threads but one, which is free for the next client.
NUM_ORDINARY: Final = 3
NUM_LARGE: Final = 1

T = TypeVar("T")


class Admission:
    """Lets one request start in each iteration of the event loop, in a round-robin over clients.

    Tokenizing a small body and placing its request block the loop for about a millisecond.  With
    this limit a thousand simultaneous requests of one client delay neither the first request of
    another client nor the tokens of open streams.
    """

    def __init__(self) -> None:
        self._waiting: FairQueue[str, asyncio.Future[None]] = FairQueue()
        self._has_started = False  # whether a request has started in this iteration

    async def wait(self, exchange: HttpExchange) -> None:
        """Wait until the request may start: not at all if none has started in this iteration.

        Raises:
            Disconnected: The client disconnected meanwhile.
        """
        loop = asyncio.get_running_loop()
        if not self._has_started:
            self._has_started = True
            loop.call_soon(self._start_next)
            return
        turn = loop.create_future()
        self._waiting.add(exchange.client_id, turn)
        try:
            await exchange.while_connected(turn)
        finally:
            self._waiting.remove(exchange.client_id, turn)

    def _start_next(self) -> None:
        """Let the next client's request start; called once per iteration of the event loop."""
        first = self._waiting.first()
        if first is None:
            self._has_started = False
            return
        client, turn = first
        self._waiting.remove(client, turn)
        self._waiting.end_turn(client)
        if not turn.done():
            turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._start_next)


@dataclass(eq=False, repr=False)
class Bodies:
    """Reads request bodies of up to `max_bytes`, which must arrive fast enough.

    After `grace_s` seconds, a body must have arrived at `min_bytes_per_s` on average.

    `total_bytes` is the size of all bodies that were not released yet.  A client's bodies may not
    be larger than the memory left for others, so a client alone may use half of `max_total_bytes`.
    """

    max_bytes: int = MAX_BODY_BYTES
    grace_s: float = 5.0
    min_bytes_per_s: int = BODY_BYTES_PER_S
    max_total_bytes: int = MAX_TOTAL_BYTES
    total_bytes: int = 0
    _bytes_of_client: Counter[str] = field(default_factory=Counter)

    async def read(self, exchange: HttpExchange) -> bytes:
        """Return the body of a request, whose bytes are counted until `release`.

        Raises:
            HttpError: 400, 408, 413 or 415.
            WireError: OVERLOADED, if there are too many large bodies at a time.
            Disconnected: The client disconnected before the end of the body.
        """
        check_content_type(exchange.scope)
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            self._count(exchange.client_id, size - counted)
            counted = size
            num_free = max(self.max_total_bytes - self.total_bytes, 0)
            if self._bytes_of_client[exchange.client_id] > num_free:
                raise WireError(
                    ErrorCode.OVERLOADED,
                    f"too many large bodies at a time: this client's come to more than the "
                    f"{num_free} bytes that are left for others; send fewer at a time",
                )

        try:
            raw = await self._read(exchange, count)
        except BaseException:
            self._count(exchange.client_id, -counted)
            raise
        exchange.is_body_read = True
        return raw

    def release(self, exchange: HttpExchange, raw: bytes) -> None:
        """Stop counting the bytes of a body that `read` returned."""
        self._count(exchange.client_id, -len(raw))

    def _count(self, client: str, num_bytes: int) -> None:
        self.total_bytes += num_bytes
        self._bytes_of_client[client] += num_bytes
        if not self._bytes_of_client[client]:
            del self._bytes_of_client[client]

    async def _read(self, exchange: HttpExchange, count: Callable[[int], None]) -> bytes:
        due = asyncio.get_running_loop().time() + self.grace_s
        deadline = MovingDeadline(due)

        def on_bytes(num_received: int, num_kept: int) -> None:
            # Only received bytes extend the deadline, not the announced size.
            deadline.at = due + num_received / self.min_bytes_per_s
            count(num_kept)

        reading = read_body(exchange.scope, exchange.receive, self.max_bytes, on_bytes)
        try:
            awaited = reading.send(None)
        except StopIteration as end:  # the usual case: the body arrived with the headers
            raw: bytes | None = end.value
        else:
            try:
                raw = await deadline.resume(reading, awaited)
            except TimeoutError:
                raise HttpError(408, "the body came too slowly", code="body_timeout") from None
        if raw is None:
            raise Disconnected
        return raw


class MovingDeadline:
    """A timeout for reading a body; the caller moves the deadline `at` when bytes arrive.

    If the whole process was paused, the deadline may pass before bytes that arrived in time are
    read.  So reading continues for LAST_LOOK_S, and times out if the deadline was not moved then.
    """

    __slots__ = ("_is_last_look", "_timeout", "_timer", "at")

    def __init__(self, at: float) -> None:
        self.at = at
        self._is_last_look = False
        self._timeout: asyncio.Timeout
        self._timer: asyncio.TimerHandle

    async def resume(self, started: Coroutine[Any, Any, T], awaited: Any) -> T:
        """Run `router.http.asgi.resume` until the deadline.  Raises TimeoutError."""
        async with asyncio.timeout(None) as self._timeout:
            self._watch()
            try:
                return await resume(started, awaited)
            finally:
                self._timer.cancel()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        if self.at > loop.time():
            self._is_last_look = False
            self._timer = loop.call_at(self.at, self._watch)
        elif not self._is_last_look:
            self._is_last_look = True
            self._timer = loop.call_later(LAST_LOOK_S, self._watch)
        else:
            self._timeout.reschedule(loop.time())


def check_content_type(scope: Scope) -> None:
    """Check that the body is declared as JSON.  Raises HttpError 415."""
    kind = find_header(scope, b"content-type") or b""
    if kind.split(b";")[0].strip().lower() != JSON:
        # Browsers let any web page send some other types without a preflight request.
        raise HttpError(
            415,
            "send the header Content-Type: application/json (curl: -H 'content-type: "
            "application/json')",
            code="unsupported_media_type",
        )


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int = MAX_BODY_BYTES,
    on_bytes: Callable[[int, int], None] = lambda num_received, num_kept: None,
) -> bytes | None:
    """Return the whole body, decompressed, or None if the client disconnected before its end.

    `on_bytes` is called with the number of bytes received and the number of bytes kept in memory
    after decompression.  It may raise an error to stop reading.

    Raises:
        HttpError: 413 if the body is over `limit`, 400 or 415 if it cannot be decompressed.
    """
    announced = find_header(scope, b"content-length") or b"0"
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    encoding = (find_header(scope, b"content-encoding") or b"identity").decode("latin-1")
    inflation = None if encoding.lower() == "identity" else Inflation(encoding)
    kept: list[bytes] = []
    num_received = num_kept = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        chunk = event.get("body", b"")
        num_received += len(chunk)
        for step in (chunk,) if inflation is None else inflation.steps(chunk):
            num_kept += len(step)
            if max(num_received, num_kept) > limit:
                raise _too_large(limit)
            on_bytes(num_received, num_kept)
            kept.append(step)
            if len(step) == STEP_BYTES:
                await asyncio.sleep(0)  # let other tasks run between two steps
        if not event.get("more_body", False):
            if inflation is not None:
                inflation.end()
            return b"".join(kept)


def _too_large(limit: int) -> HttpError:
    message = f"the body is over the limit of {limit} bytes"
    return HttpError(413, message, code="body_too_large")


class Threads:
    """Runs work on the event loop or in a thread, depending on the size of its input.

    Work in a thread must release the GIL, or hold it for only a few milliseconds at a time.
    """

    def __init__(self) -> None:
        self.ordinary = FairThreads(NUM_ORDINARY, "ordinary-body")
        self._large = FairThreads(NUM_LARGE, "large-body")

    async def run(self, exchange: HttpExchange, size: int, work: Callable[[], T]) -> T:
        """Run `work` and return its result.

        Raises:
            Disconnected: The client disconnected before the result; queued work is cancelled.
            WireError: OVERLOADED, if too much work of this client is queued.
        """
        if size <= INLINE_BYTES:
            return work()
        threads = self.ordinary if size <= ORDINARY_BYTES else self._large
        result = asyncio.wrap_future(threads.submit(exchange.client_id, work))
        return await exchange.while_connected(result)
