"""The peers of a bound socket: their connections and the frames queued for each.

libzmq's monitor names a closed connection by its file descriptor only; each frame tells the
descriptor that it came by.  Descriptors are reused: every event up to now must have been noticed
(`open`, `close`) before `meet`.  `transmit(peer, parts, sending)` raises as `outbox.Transmit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from wire.aio.outbox import Limits, Outbox, Sending
from wire.errors import PeerLost
from wire.parts import Buffer


class Peers:
    """Peers by routing id.  A peer whose connection ended stays, unreachable, until `lose`."""

    def __init__(
        self,
        limits: Limits,
        transmit: Callable[[bytes, Sequence[Buffer], Sending | None], None],
        on_lost: Callable[[bytes], None],
    ) -> None:
        self._limits = limits
        self._transmit = transmit
        self._on_lost = on_lost
        # Per peer.
        self._outboxes: dict[bytes, Outbox] = {}
        self._blocked: dict[bytes, Outbox] = {}
        self._fd_of: dict[bytes, int] = {}
        self._ended: dict[bytes, None] = {}  # a dict for its order
        # Per connection, by file descriptor.
        self._live: set[int] = set()
        self._peer_of: dict[int, bytes] = {}

    @property
    def reachable(self) -> list[bytes]:
        return [peer for peer in self._outboxes if peer not in self._ended]

    def knows(self, peer: bytes) -> bool:
        """Whether a message of `peer` needs no `meet`."""
        return peer in self._outboxes and not self._ended

    def is_live(self, fd: int) -> bool:
        """Whether this connection has not ended."""
        return fd in self._live

    def open(self, fd: int) -> None:
        """A connection was accepted; who it is its first message will tell."""
        self._live.add(fd)

    def close(self, fd: int) -> None:
        """A connection ended."""
        self._live.discard(fd)
        peer = self._peer_of.pop(fd, None)
        if peer is not None:
            self._ended[peer] = None

    def meet(self, peer: bytes, fd: int) -> None:
        """A message of `peer` came by connection `fd`."""
        if peer in self._ended and self._fd_of[peer] != fd:
            self._lose(peer)  # It is back by a new connection before the old one was settled.
        if peer in self._outboxes:
            return
        self._outboxes[peer] = Outbox(
            peer.decode(errors="replace"), self._limits, partial(self._transmit, peer)
        )
        self._fd_of[peer] = fd
        if fd in self._live:
            self._peer_of[fd] = peer
        else:  # It said this and left.
            self._ended[peer] = None

    def send(self, peer: bytes, parts: Sequence[Buffer], *, track: bool) -> Sending | None:
        """See `zmq.Hub.send`."""
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
        """Send what waits; return the seconds to the next try, None: all is sent."""
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

    def settle(self) -> None:
        """Report the peers whose connection ended; all they sent has been delivered."""
        for peer in list(self._ended):
            self._lose(peer)

    def forget(self, peer: bytes) -> None:
        """Drop what waits for `peer`; its next message makes it known again."""
        self._ended.pop(peer, None)
        self._blocked.pop(peer, None)
        outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            outbox.drop()
        fd = self._fd_of.pop(peer, -1)
        if self._peer_of.get(fd) == peer:
            del self._peer_of[fd]

    def clear(self) -> None:
        """Forget everyone."""
        for peer in list(self._outboxes):
            self.forget(peer)

    def _lose(self, peer: bytes) -> None:
        self.forget(peer)
        self._on_lost(peer)
