"""The decode workers that a prefill worker sends KV to, as routers name them in PEERS frames.

An endpoint has one link, whichever routers name it: a decode worker does not read a second
connection of one identity.  So a link that no router names is kept for a while, and a silent link
is closed before another is made.  SPEC 5.4.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from wire.aio.zmq import Sending
from wire.errors import PeerLost, RemoteProtocolError, WireError
from wire.frames import ANY_RANK, Error, Frame, KvCacheAck
from wire.parts import Buffer, Message, decode, encode
from wire.payloads import Credit, ErrorDetail, PeerDetail, decode_error, encode_map
from wire.process.frame_counters import Traffic
from wire.process.settings import ConfigError
from worker.environment import Plane
from worker.transfer.segment_link import SegmentLink

log = structlog.get_logger("worker")

# Time that an unused link is kept which no router names.
KEEP_S: Final = 60.0
# Such links at most: each has two sockets, and for segments a socket, a thread and five other
# descriptors.
MAX_KEPT: Final = 16


class Receiver(Protocol):
    """Gets the replies to one transfer (`worker.transfer.sender`)."""

    def on_ack(self, ack: KvCacheAck, credit: Credit) -> None: ...
    def on_error(self, code: int, message: str) -> None: ...
    def fail(self, error: WireError) -> None: ...


class DecodePeer:
    """A decode worker: its KV link, and perhaps a connection for `segments`."""

    def __init__(
        self,
        detail: PeerDetail,
        identity: bytes,
        plane: Plane,
        now: float,
        *,
        segment_traffic: Traffic | None = None,
    ) -> None:
        self.detail = detail
        self.receivers: dict[int, Receiver] = {}  # by request id, while a transfer is under way
        self.num_messages = 0
        self.is_mute = False  # it sent nothing at all for a whole lease
        self.needed_at = now
        self.expected = self.name
        self._link = plane.link(
            identity, detail.kv_endpoint, self._on_message, self._on_down, self.expected
        )
        self.segments: SegmentLink | None = None
        if segment_traffic is not None and detail.kv_endpoint.startswith("tcp://"):
            self.segments = SegmentLink(detail.kv_endpoint, segment_traffic, self.fail_all)

    @property
    def name(self) -> str:
        return f"decode-{self.detail.rank}"

    @property
    def is_up(self) -> bool:
        return self._link.is_up

    def send(self, frame: Frame, *payload: Buffer, track: bool = False) -> Sending | None:
        """Send now or as soon as the peer takes it.

        Raises:
            WireError: Too much waits for this peer already, or the link is closed.
        """
        return self._link.send(encode(frame, *payload), track=track)

    def tell(self, frame: Frame, *payload: Buffer) -> None:
        """Send a frame that may get lost: the peer's lease ends the transfer without it."""
        try:
            self.send(frame, *payload)
        except WireError as error:
            log.warning("frame dropped", peer=self.name, tag=frame.tag.name, reason=error.message)

    def fail_all(self) -> None:
        """Fail every transfer under way."""
        for receiver in list(self.receivers.values()):
            receiver.fail(PeerLost(self.name))

    async def close(self) -> None:
        if self.segments is not None:
            await self.segments.close()
        await self._link.close(0.5)

    def _on_message(self, parts: list[Buffer]) -> None:
        self.num_messages += 1
        self.is_mute = False
        try:
            self._dispatch(decode(parts))
        except RemoteProtocolError as error:
            log.warning("bad frame from decode worker", peer=self.name, reason=error.message)
            self.tell(Error(0, error.code), encode_map(ErrorDetail(message=error.message)))

    def _dispatch(self, message: Message) -> None:
        match frame := message.frame:
            case KvCacheAck() | Error():
                receiver = self.receivers.get(frame.request_id)
            case _:
                raise RemoteProtocolError(f"a decode worker does not send {frame.tag.name}")
        if receiver is None:  # it has ended here, or is about no transfer at all
            log.debug("late answer", peer=self.name, tag=frame.tag.name, request=frame.request_id)
            return
        try:
            if isinstance(frame, Error):
                receiver.on_error(frame.code, decode_error(message.body()).message)
            else:
                receiver.on_ack(frame, Credit.unpack(message.body()))
        except RemoteProtocolError as error:
            receiver.fail(error)
            raise

    def _on_down(self) -> None:
        log.warning("decode worker lost", peer=self.name, transfers=len(self.receivers))
        if self.segments is not None:
            self.segments.reset()
        self.fail_all()


class DecodePeers:
    """All known decode workers, with segment connections if `has_segments`, on Linux."""

    def __init__(
        self,
        identity: bytes,
        plane: Plane,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_segments: bool = False,
    ) -> None:
        self.segment_traffic = Traffic()
        self._has_segments = has_segments and sys.platform == "linux"
        self._identity = identity
        self.plane = plane
        self._clock = clock
        self._named: dict[str, list[PeerDetail]] = {}  # by router endpoint
        self._peers: dict[str, DecodePeer] = {}  # by KV endpoint
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def num_links(self) -> int:
        return len(self._peers)

    @property
    def num_up(self) -> int:
        return sum(peer.is_up for peer in self._peers.values())

    @property
    def num_transfers(self) -> int:
        """Transfers that may still get a reply."""
        return sum(len(peer.receivers) for peer in self._peers.values())

    def update(self, router: str, details: list[PeerDetail]) -> None:
        """Apply a router's PEERS frame: connect to the workers in it."""
        self._named[router] = details
        for detail in details:
            self._connect(detail)
        named = self._named_endpoints()
        kept = [
            endpoint
            for endpoint, peer in self._peers.items()
            if endpoint not in named and not peer.receivers
        ]
        for endpoint in kept[:-MAX_KEPT]:
            self._close(self._peers.pop(endpoint))

    def find(self, router: str, rank: int) -> DecodePeer | None:
        """Return the decode worker of this rank, or of `ANY_RANK`, that this router named."""
        for detail in self._named.get(router, ()):
            if rank in (detail.rank, ANY_RANK):
                return self._connect(detail)
        return None

    def tick(self, now: float) -> None:
        """Close unused and mute links."""
        named = self._named_endpoints()
        for endpoint, peer in list(self._peers.items()):
            if endpoint in named or peer.receivers:
                peer.needed_at = now
            if peer.is_mute or now - peer.needed_at >= KEEP_S:
                peer.fail_all()
                self._close(self._peers.pop(endpoint))

    async def close(self) -> None:
        """Close all, and open no more: a new socket would keep the plane from closing."""
        self._is_closed = True
        for peer in self._peers.values():
            self._close(peer)
        self._peers.clear()
        await asyncio.gather(*self._closing)

    def _named_endpoints(self) -> set[str]:
        return {detail.kv_endpoint for details in self._named.values() for detail in details}

    def _connect(self, detail: PeerDetail) -> DecodePeer | None:
        if self._is_closed:
            return None
        peer = self._peers.get(detail.kv_endpoint)
        if peer is not None and (peer.is_up or peer.expected == f"decode-{detail.rank}"):
            peer.detail = detail  # a restarted worker may listen where the old one did
            return peer
        if peer is not None:
            # The link expects another rank, and with keys never connects to the one named now.
            peer.fail_all()
            self._close(self._peers.pop(detail.kv_endpoint))
        try:
            peer = DecodePeer(
                *(detail, self._identity, self.plane, self._clock()),
                segment_traffic=self.segment_traffic if self._has_segments else None,
            )
        except (OSError, ConfigError) as error:
            log.error("no way to the decode worker", rank=detail.rank, reason=str(error))
            return None
        self._peers[detail.kv_endpoint] = peer
        return peer

    def _close(self, peer: DecodePeer) -> None:
        task = asyncio.create_task(peer.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
