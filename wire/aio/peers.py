"""The peers of a bound socket: their connections and send queues.

libzmq's monitor identifies a closed connection only by its file descriptor, and each received frame
has the descriptor of its connection.  Descriptors are reused, so all monitor events so far must
have been processed (by `open` and `close`) before `register` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from wire.aio.outbox import Limits, Outbox, Sending
from wire.errors import PeerLost
from wire.parts import Buffer


class Peers:
    """The peers of a bound socket by routing id.

    A disconnected peer is kept as unreachable until `report_lost` is called.  For
    `transmit(peer, parts, sending)` see `outbox.Transmit`.
    """

    def __init__(
        self,
        limits: Limits,
        transmit: Callable[[bytes, Sequence[Buffer], Sending | None], None],
        on_lost: Callable[[bytes], None],
    ) -> None:
        self._limits = limits
        self._transmit = transmit
        self._on_lost = on_lost
        # By peer.
        self._outboxes: dict[bytes, Outbox] = {}
        self._blocked: dict[bytes, Outbox] = {}
        self._fd_of: dict[bytes, int] = {}
        self._ended: dict[bytes, None] = {}  # a dict for its order
        # By file descriptor of a connection.
        self._live: set[int] = set()
        self._peer_of: dict[int, bytes] = {}

    @property
    def reachable(self) -> list[bytes]:
        return [peer for peer in self._outboxes if peer not in self._ended]

    def is_registered(self, peer: bytes) -> bool:
        """Whether `peer` is registered, and no connection has ended since."""
        return peer in self._outboxes and not self._ended

    def is_live(self, fd: int) -> bool:
        """Whether the connection is still open."""
        return fd in self._live

    def open(self, fd: int) -> None:
        """Record an accepted connection.  Its peer is known from its first message on."""
        self._live.add(fd)

    def close(self, fd: int) -> None:
        """Record the end of a connection."""
        self._live.discard(fd)
        peer = self._peer_of.pop(fd, None)
        if peer is not None:
            self._ended[peer] = None

    def register(self, peer: bytes, fd: int) -> None:
        """Record that a message from `peer` came by connection `fd`."""
        if peer in self._ended and self._fd_of[peer] != fd:
            self._lose(peer)  # it has reconnected before the end of the old connection was reported
        if peer in self._outboxes:
            return
        self._outboxes[peer] = Outbox(
            peer.decode(errors="replace"), self._limits, partial(self._transmit, peer)
        )
        self._fd_of[peer] = fd
        if fd in self._live:
            self._peer_of[fd] = peer
        else:  # the connection has ended after this message
            self._ended[peer] = None

    def send(self, peer: bytes, parts: Sequence[Buffer], *, track: bool) -> Sending | None:
        """Send or queue a message; see `zmq.Hub.send`."""
        outbox = self._outboxes.get(peer)
        if outbox is None or peer in self._ended:
            raise PeerLost(peer.decode(errors="replace"))
        try:
            sending = outbox.send(parts, track=track, now=not outbox)
        except ConnectionError as error:
            self._ended[peer] = None
            raise PeerLost(outbox.peer) from error
        if outbox:
            self._blocked[peer] = outbox
        return sending

    def flush(self) -> float | None:
        """Send queued messages; return the seconds until the next flush, None if all are sent."""
        pauses_s = []
        for peer, outbox in list(self._blocked.items()):
            try:
                pause_s = outbox.flush()
            except ConnectionError:
                self._ended[peer] = None
                outbox.drop()
                pause_s = None
            if pause_s is None:
                del self._blocked[peer]
            else:
                pauses_s.append(pause_s)
        return min(pauses_s, default=None)

    def queued_bytes(self, peer: bytes) -> int:
        outbox = self._outboxes.get(peer)
        return outbox.num_bytes if outbox is not None else 0

    def report_lost(self) -> None:
        """Report the peers whose connection has ended, after their last messages were delivered."""
        for peer in list(self._ended):
            self._lose(peer)

    def forget(self, peer: bytes) -> None:
        """Remove `peer` and drop its queue.  Its next message registers it again."""
        self._ended.pop(peer, None)
        self._blocked.pop(peer, None)
        outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            outbox.drop()
        fd = self._fd_of.pop(peer, -1)
        if self._peer_of.get(fd) == peer:
            del self._peer_of[fd]

    def clear(self) -> None:
        """Remove all peers."""
        for peer in list(self._outboxes):
            self.forget(peer)

    def _lose(self, peer: bytes) -> None:
        self.forget(peer)
        self._on_lost(peer)
