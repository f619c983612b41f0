"""Limits on the body of a request: its size, its rate, and the time of the loop.

A body must be JSON, small enough, inflated too, and fast enough.  All bodies that are being read or
understood have one limit together: what goes over it is refused at once, since whoever is made to
wait holds memory meanwhile, and may do so on purpose.

Large bodies and large answers are worked on in threads.  There are few, so that many large bodies
at once cost the memory and the cores of a few; clients take turns at them
(`wire.process.fair_threads`), and ordinary bodies do not wait behind the largest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from router.api.errors import HttpError
from router.http.asgi import JSON, Disconnected, HttpExchange, Receive, Scope, find_header
from router.http.compression import STEP_BYTES, Inflation
from router.http.eager import go_on
from wire.aio.listener import LAST_LOOK_S
from wire.errors import ErrorCode, WireError
from wire.process.fair_threads import FairThreads

# Half a million tokens as text, or 300,000 as decimal ids.  Reading JSON and freeing what the
# tokenizer made of a text hold the GIL: of 4 MB for longer than others should wait.
MAX_BODY_BYTES: Final = 2 * 1024 * 1024
# A body must come at this rate at least, after a grace; slower is an attack or a broken link.
BODY_BYTES_PER_S: Final = 64 * 1024
# Of all bodies that are being read or understood.
MAX_TOTAL_BYTES: Final = 256 * 1024 * 1024

# Bodies up to this size are worked on by the loop itself: about a millisecond.
INLINE_BYTES: Final = 16 * 1024
# Up to here it takes some ten milliseconds; far more beyond.
ORDINARY_BYTES: Final = 128 * 1024
# Two for a client that is alone, and one that is free for the next.
NUM_ORDINARY: Final = 3
NUM_LARGE: Final = 1

T = TypeVar("T")


class Bodies:
    """Reads bodies: each of `max_bytes`, begun within `grace_s`, then at `min_bytes_per_s`.

    `total_bytes` are those of all that are being read or understood.  A client may have as many of
    them as are left free: half if it is alone, and the more it has, the more is left for others.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BODY_BYTES,
        grace_s: float = 5.0,
        *,
        min_bytes_per_s: int = BODY_BYTES_PER_S,
        max_total_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._min_bytes_per_s = min_bytes_per_s
        self._max_total_bytes = max_total_bytes
        self.total_bytes = 0
        self._bytes_of_client: Counter[str] = Counter()

    async def read(self, exchange: HttpExchange) -> bytes:
        """Return the body of a request; its bytes count until `let_go`.

        Raises:
            HttpError: 400, 408, 413 or 415.
            WireError: OVERLOADED; there are too many at a time.
            Disconnected: The client left before its end.
        """
        check_content_type(exchange.scope)
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            self._count(exchange.asker, size - held)
            held = size
            num_free = max(self._max_total_bytes - self.total_bytes, 0)
            if self._bytes_of_client[exchange.asker] > num_free:
                raise WireError(
                    ErrorCode.OVERLOADED,
                    f"too many large bodies at a time: this client's come to more than the "
                    f"{num_free} bytes that are left for others; send fewer at a time",
                )

        try:
            raw = await self._read(exchange, hold)
        except BaseException:
            self._count(exchange.asker, -held)
            raise
        exchange.is_body_read = True
        return raw

    def let_go(self, exchange: HttpExchange, raw: bytes) -> None:
        """Parses the bytes that `read` returned, or refuses them."""
        self._count(exchange.asker, -len(raw))

    def _count(self, client: str, num_bytes: int) -> None:
        self.total_bytes += num_bytes
        self._bytes_of_client[client] += num_bytes
        if not self._bytes_of_client[client]:
            del self._bytes_of_client[client]

    async def _read(self, exchange: HttpExchange, hold: Callable[[int], None]) -> bytes:
        due = asyncio.get_running_loop().time() + self._grace_s
        patience = Patience(due)

        def on_bytes(num_came: int, num_kept: int) -> None:
            # It moves with what has come: a body that trickles ends soon, whatever its size is
            # said to be.
            patience.deadline = due + num_came / self._min_bytes_per_s
            hold(num_kept)

        reading = read_body(exchange.scope, exchange.receive, self._max_bytes, on_bytes)
        try:
            awaited = reading.send(None)
        except StopIteration as end:  # all of it had come with its headers, as it mostly does
            raw: bytes | None = end.value
        else:
            try:
                raw = await patience.go_on(reading, awaited)
            except TimeoutError:
                raise HttpError(408, "the body came too slowly", code="body_timeout") from None
        if raw is None:
            raise Disconnected
        return raw


class Patience:
    """Waits for a body until a `deadline` that its bytes move as they come.

    If the whole process stood still, the deadline may be over before bytes that came in time are
    read.  So they are read for LAST_LOOK_S more.  Then it ends, unless they moved the deadline
    beyond that moment: who trickles does not, so no byte of its buys another look.
    """

    __slots__ = ("_is_last_look", "_timeout", "_timer", "deadline")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._is_last_look = False
        self._timeout: asyncio.Timeout
        self._timer: asyncio.TimerHandle

    async def go_on(self, begun: Coroutine[Any, Any, T], awaited: Any) -> T:
        """Return what `router.http.eager.go_on` does.  Raises TimeoutError."""
        async with asyncio.timeout(None) as self._timeout:
            self._watch()
            try:
                return await go_on(begun, awaited)
            finally:
                self._timer.cancel()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        if self.deadline > loop.time():
            self._is_last_look = False
            self._timer = loop.call_at(self.deadline, self._watch)
        elif not self._is_last_look:
            self._is_last_look = True
            self._timer = loop.call_later(LAST_LOOK_S, self._watch)
        else:
            self._timeout.reschedule(loop.time())


def check_content_type(scope: Scope) -> None:
    """Refuse bodies that do not say that they are JSON.

    Raises:
        HttpError: 415.
    """
    kind = find_header(scope, b"content-type") or b""
    if kind.split(b";")[0].strip().lower() != JSON:
        # A web page may send any other type to any host without asking first.
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
    on_bytes: Callable[[int, int], None] = lambda num_came, num_kept: None,
) -> bytes | None:
    """Return the whole body, inflated; None when the client went away before its end.

    `on_bytes` is told how many bytes have come and how many are kept of them, which are more where
    they came compressed; what it raises ends the reading.

    Raises:
        HttpError: 413, before more than `limit` bytes are kept.  400 or 415: it cannot be inflated.
    """
    announced = find_header(scope, b"content-length") or b"0"
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    encoding = (find_header(scope, b"content-encoding") or b"identity").decode("latin-1")
    inflation = None if encoding.lower() == "identity" else Inflation(encoding)
    kept: list[bytes] = []
    num_came = num_kept = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        chunk = event.get("body", b"")
        num_came += len(chunk)
        for step in (chunk,) if inflation is None else inflation.steps(chunk):
            num_kept += len(step)
            if max(num_came, num_kept) > limit:
                raise _too_large(limit)
            on_bytes(num_came, num_kept)
            kept.append(step)
            if len(step) == STEP_BYTES:
                await asyncio.sleep(0)  # there is more to inflate, and others need a turn too
        if not event.get("more_body", False):
            if inflation is not None:
                inflation.end()
            return b"".join(kept)


def _too_large(limit: int) -> HttpError:
    message = f"the body is over the limit of {limit} bytes"
    return HttpError(413, message, code="body_too_large")


class Threads:
    """Runs `work` by the size of what it works on: in the loop, or in a thread.

    In a thread it must release the GIL, or hold it for a few milliseconds at a time.
    """

    def __init__(self) -> None:
        self.ordinary = FairThreads(NUM_ORDINARY, "ordinary-body")
        self._large = FairThreads(NUM_LARGE, "large-body")

    async def run(self, exchange: HttpExchange, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises.

        Raises:
            Disconnected: The client left before; work that waits is dropped.
            WireError: OVERLOADED; too much work of this client waits.
        """
        if size <= INLINE_BYTES:
            return work()
        threads = self.ordinary if size <= ORDINARY_BYTES else self._large
        return await exchange.unless_left(asyncio.wrap_future(threads.submit(exchange.asker, work)))
