"""The outgoing messages of one peer: sent immediately, or queued up to a limit in bytes.

If the queue of a peer is full, `Outbox.send` raises an error; other peers are not delayed.  A
`Sending` reports when the buffers of a message may be reused.  Delivery is at most once: when a
connection ends, its queue is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from wire.errors import ErrorCode, LocalProtocolError, WireError
from wire.parts import Buffer

# Regular messages have 2 to 5 parts.  The limit keeps a peer from making us allocate many objects.
MAX_PARTS: Final = 64
# Bytes counted for the Python objects of a queued message, so that empty messages are limited too.
MESSAGE_OVERHEAD: Final = 256
# Messages that one flush sends before other callbacks of the event loop run.
MAX_BURST: Final = 256
# A full socket is retried when it becomes writable, and after this time in case that was missed.
RETRY_S: Final = 0.01


def size_of(part: Buffer) -> int:
    """Return the size of a buffer in bytes (`len` of a memoryview counts items)."""
    return part.nbytes if isinstance(part, memoryview) else len(part)


class Tracker(Protocol):
    """Reports whether the socket library still uses a buffer (zmq.MessageTracker)."""

    @property
    def done(self) -> bool: ...


class Sending:
    """A tracked message: the caller must not modify its buffers until `done`."""

    def __init__(self) -> None:
        self.was_dropped = False
        self._trackers: list[Tracker] | None = None  # None: still queued in the outbox

    @property
    def done(self) -> bool:
        """Whether all buffers may be reused.  This does not mean that the message was received."""
        if self._trackers:
            self._trackers = [tracker for tracker in self._trackers if not tracker.done]
        return self._trackers == []

    async def wait(self) -> None:
        """Wait until `done`, by polling every 0.5 to 20 ms because libzmq has no notification."""
        pause_s = 0.0005
        while not self.done:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    def hand_over(self, trackers: list[Tracker]) -> None:
        """Record that libzmq has the message; its buffers are free when all trackers are done."""
        self._trackers = trackers

    def drop(self) -> None:
        """Record that the message is dropped, so that its buffers may be reused."""
        self._trackers = []
        self.was_dropped = True


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in bytes: per message part, and for the data queued per peer."""

    part_bytes: int
    queue_bytes: int

    def __post_init__(self) -> None:
        if self.queue_bytes < self.part_bytes + MESSAGE_OVERHEAD:
            raise ValueError(
                f"max_queue_bytes = {self.queue_bytes} holds no message of "
                f"max_message_bytes = {self.part_bytes}"
            )

    def measure(self, parts: Sequence[Buffer]) -> int:
        """Return the size of a message in bytes.  Raises LocalProtocolError if over a limit."""
        num_bytes = 0
        for part in parts:
            size = size_of(part)
            if size > self.part_bytes:
                raise LocalProtocolError(f"a part of {size} bytes is over {self.part_bytes}")
            num_bytes += size
        if not 0 < len(parts) <= MAX_PARTS:
            raise LocalProtocolError(f"a message has 1 to {MAX_PARTS} parts, not {len(parts)}")
        return num_bytes


# Passes one message to the socket.  Raises BlockingIOError if it is full, and ConnectionError if
# there is no such peer; in both cases nothing was sent.
Transmit = Callable[[Sequence[Buffer], Sending | None], None]


class Outbox:
    """The send queue of one peer; `num_bytes` includes `MESSAGE_OVERHEAD` per message."""

    def __init__(self, peer: str, limits: Limits, transmit: Transmit) -> None:
        self.peer = peer
        self.num_bytes = 0
        self._limits = limits
        self._transmit = transmit
        self._queue: deque[tuple[Sequence[Buffer], int, Sending | None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def send(self, parts: Sequence[Buffer], *, track: bool, now: bool) -> Sending | None:
        """Transmit a message if `now`; queue it otherwise, or if the socket is full.

        Without `track`, the caller may reuse the buffers at once, so mutable ones are copied.
        Raises WireError (OVERLOADED) if the queue is full, ConnectionError if there is no such
        peer, and LocalProtocolError if the message is over a limit.
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
        """Transmit queued messages; return the seconds until the next flush, None if all are sent.

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
        """Drop the queued messages, because the connection has ended."""
        for _, _, sending in self._queue:
            if sending is not None:
                sending.drop()
        self._queue.clear()
        self.num_bytes = 0
