"""The outgoing messages of one peer: sent at once, or queued up to a bound in bytes.

A full peer makes `Outbox.send` raise and delays no other peer.  A `Sending` tells when the buffers
of a message may be reused.  Delivery is at most once: the queue is dropped when a connection ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from wire.errors import ErrorCode, LocalProtocolError, WireError
from wire.parts import Buffer

# Our messages have 2 to 5 parts; more from a peer is an attempt to make us hold many objects.
MAX_PARTS: Final = 64
# Python objects around a queued message, so that a flood of empty ones is bounded too.
MESSAGE_OVERHEAD: Final = 256
# Messages one flush sends before the loop gets its turn.
MAX_BURST: Final = 256
# A full peer's socket is tried again when it says so, and after this in case that was missed.
RETRY_S: Final = 0.01


def size_of(part: Buffer) -> int:
    """Return the bytes of a buffer; the length of a memoryview is in items, not bytes."""
    return part.nbytes if isinstance(part, memoryview) else len(part)


class Tracker(Protocol):
    """Tells whether the socket library still needs a buffer (zmq.MessageTracker)."""

    @property
    def done(self) -> bool: ...


class Sending:
    """A message whose buffers the caller wants back.  Leave them alone until `done`."""

    def __init__(self) -> None:
        self.was_dropped = False
        self._trackers: list[Tracker] | None = None  # None: still in the outbox

    @property
    def done(self) -> bool:
        """Whether every buffer is free: taken by the kernel or dropped.  It is not delivery."""
        if self._trackers:
            self._trackers = [tracker for tracker in self._trackers if not tracker.done]
        return self._trackers == []

    async def wait(self) -> None:
        """Return when `done`.  libzmq does not report it, so this polls every 0.5 to 20 ms."""
        pause_s = 0.0005
        while not self.done:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    def hand_over(self, trackers: list[Tracker]) -> None:
        """The message left the outbox; its buffers are free when these say so."""
        self._trackers = trackers

    def drop(self) -> None:
        """The message will not be sent; its buffers are free."""
        self._trackers = []
        self.was_dropped = True


@dataclass(frozen=True, slots=True)
class Limits:
    """Byte bounds: of one part of a message, and of what waits for one peer."""

    part_bytes: int
    queue_bytes: int

    def __post_init__(self) -> None:
        if self.queue_bytes < self.part_bytes + MESSAGE_OVERHEAD:
            raise ValueError(
                f"max_queue_bytes = {self.queue_bytes} holds no message of "
                f"max_message_bytes = {self.part_bytes}"
            )

    def measure(self, parts: Sequence[Buffer]) -> int:
        """Return the bytes of a message.  Raises LocalProtocolError."""
        num_bytes = 0
        for part in parts:
            size = size_of(part)
            if size > self.part_bytes:
                raise LocalProtocolError(f"a part of {size} bytes is over {self.part_bytes}")
            num_bytes += size
        if not 0 < len(parts) <= MAX_PARTS:
            raise LocalProtocolError(f"a message has 1 to {MAX_PARTS} parts, not {len(parts)}")
        return num_bytes


# Hands one message to the socket: BlockingIOError if it is full, ConnectionError if there is no
# such peer; of neither has anything been sent.
Transmit = Callable[[Sequence[Buffer], Sending | None], None]


class Outbox:
    """The way to one peer.  `num_bytes` wait, counting `MESSAGE_OVERHEAD` for each message."""

    def __init__(self, peer: str, limits: Limits, transmit: Transmit) -> None:
        self.peer = peer
        self.num_bytes = 0
        self._limits = limits
        self._transmit = transmit
        self._queue: deque[tuple[Sequence[Buffer], int, Sending | None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def send(self, parts: Sequence[Buffer], *, track: bool, now: bool) -> Sending | None:
        """Transmit a message now, or queue it if that must not be or the socket is full.

        Without `track` the caller may reuse its buffers at once, so mutable ones are copied.
        Raises WireError (OVERLOADED: the queue is full), ConnectionError, or as `Limits.measure`.
        """
        num_bytes = self._limits.measure(parts) + MESSAGE_OVERHEAD
        sending = Sending() if track else None
        if now:
            try:
                self._transmit(parts, sending)
                return sending
            except BlockingIOError:
                pass
        if self.num_bytes + num_bytes > self._limits.queue_bytes:
            raise WireError(
                ErrorCode.OVERLOADED,
                f"{self.num_bytes} of {self._limits.queue_bytes} bytes wait for {self.peer}",
            )
        if sending is None:
            parts = [part if type(part) is bytes else bytes(part) for part in parts]
        self._queue.append((list(parts), num_bytes, sending))
        self.num_bytes += num_bytes
        return sending

    def flush(self) -> float | None:
        """Transmit in order, one burst at most; return the seconds to the next, None: all is sent.

        Raises:
            ConnectionError: There is no such peer.
        """
        for _ in range(min(len(self._queue), MAX_BURST)):
            parts, num_bytes, sending = self._queue[0]
            try:
                self._transmit(parts, sending)
            except BlockingIOError:
                return RETRY_S
            self._queue.popleft()
            self.num_bytes -= num_bytes
        return 0.0 if self._queue else None

    def drop(self) -> None:
        """Drop the queued messages: their connection is gone."""
        for _, _, sending in self._queue:
            if sending is not None:
                sending.drop()
        self._queue.clear()
        self.num_bytes = 0
