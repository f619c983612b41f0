"""The decode and any workers that this one sends KV to; routers list them in PEERS frames.

There is one link per endpoint, even if several routers list it, because a decode worker ignores a
second connection with the same identity.  For that reason a link that no router lists any more is
kept for a while, and an unresponsive link is closed before a new one is opened.  SPEC 5.4.
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
from wire.identity import Identity
from wire.parts import Buffer, Message, decode, encode
from wire.payloads import Credit, ErrorDetail, PeerDetail, decode_error, encode_map
from wire.process.frame_counters import Traffic
from wire.process.settings import ConfigError
from worker.environment import Plane
from worker.transfer.segment_link import SegmentLink

log = structlog.get_logger("worker")

# How long an unused link is kept that no router lists.
KEEP_S: Final = 60.0
# Maximum number of such links.  Each needs two sockets, and its segment connection another socket,
# a thread and five other descriptors.
MAX_KEPT: Final = 16


class Receiver(Protocol):
    """Handles the decode worker's replies to one transfer (`worker.transfer.sender`)."""

    def on_ack(self, ack: KvCacheAck, credit: Credit) -> None: ...
    def on_error(self, code: int, message: str) -> None: ...
    def fail(self, error: WireError) -> None: ...


def party_of(detail: PeerDetail) -> str:
    return f"{detail.role}-{detail.rank}"


class DecodePeer:
    """A worker that receives KV: its KV link, and its segment connection if there is one."""

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
        self.receivers: dict[int, Receiver] = {}  # of the running transfers, by request id
        self.num_messages = 0
        self.is_mute = False  # the peer has sent nothing at all for a whole lease
        self.needed_at = now
        self.expected = self.name  # the worker whose public key the link accepts
        self._link = plane.link(
            identity, detail.kv_endpoint, self._on_message, self._on_down, self.expected
        )
        self.segments: SegmentLink | None = None
        if segment_traffic is not None and detail.kv_endpoint.startswith("tcp://"):
            self.segments = SegmentLink(detail.kv_endpoint, segment_traffic, self.fail_all)

    @property
    def name(self) -> str:
        return party_of(self.detail)

    @property
    def is_up(self) -> bool:
        return self._link.is_up

    def send(self, frame: Frame, *payload: Buffer, track: bool = False) -> Sending | None:
        """Queue a frame for the peer.

        Raises:
            WireError: The queue for this peer is full, or the link is closed.
        """
        return self._link.send(encode(frame, *payload), track=track)

    def tell(self, frame: Frame, *payload: Buffer) -> None:
        """Send a frame, or log that it was dropped: the peer's lease makes up for its loss."""
        try:
            self.send(frame, *payload)
        except WireError as error:
            log.warning("frame dropped", peer=self.name, tag=frame.tag.name, reason=error.message)

    def fail_all(self) -> None:
        """Fail all transfers to this peer."""
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
        if receiver is None:  # the transfer has ended, or never existed
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
    """All known decode and any workers, but for this one.

    On Linux there are segment connections too, counted in `segment_traffic`, unless that is None.
    Without `connects_early`, a link is opened for the first transfer to a worker.
    """

    def __init__(
        self,
        identity: bytes,
        plane: Plane,
        clock: Callable[[], float] = time.monotonic,
        *,
        segment_traffic: Traffic | None = None,
        connects_early: bool = True,
    ) -> None:
        self._segment_traffic = segment_traffic if sys.platform == "linux" else None
        self._identity = identity
        self._connects_early = connects_early
        self.plane = plane
        self._clock = clock
        self._listed: dict[str, list[PeerDetail]] = {}  # by router endpoint
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
        """The number of transfers that may still get a reply."""
        return sum(len(peer.receivers) for peer in self._peers.values())

    def update(self, router: str, details: list[PeerDetail]) -> None:
        """Apply a router's PEERS frame."""
        own = str(Identity.parse(self._identity))
        self._listed[router] = [detail for detail in details if party_of(detail) != own]
        if self._connects_early:
            for detail in self._listed[router]:
                self._connect(detail)
        listed = self._listed_endpoints()
        kept = [
            endpoint
            for endpoint, peer in self._peers.items()
            if endpoint not in listed and not peer.receivers
        ]
        for endpoint in kept[:-MAX_KEPT]:
            self._close(self._peers.pop(endpoint))

    def find(self, router: str, rank: int) -> DecodePeer | None:
        """Return the worker that this router lists with `rank` (`ANY_RANK` for any)."""
        for detail in self._listed.get(router, ()):
            if rank in (detail.rank, ANY_RANK):
                return self._connect(detail)
        return None

    def tick(self, now: float) -> None:
        """Close unused and unresponsive links."""
        listed = self._listed_endpoints()
        for endpoint, peer in list(self._peers.items()):
            if endpoint in listed or peer.receivers:
                peer.needed_at = now
            if peer.is_mute or now - peer.needed_at >= KEEP_S:
                peer.fail_all()
                self._close(self._peers.pop(endpoint))

    async def close(self) -> None:
        """Close all links and open no new ones: an open socket would block `KVPlane.close`."""
        self._is_closed = True
        for peer in self._peers.values():
            self._close(peer)
        self._peers.clear()
        await asyncio.gather(*self._closing)

    def _listed_endpoints(self) -> set[str]:
        return {detail.kv_endpoint for details in self._listed.values() for detail in details}

    def _connect(self, detail: PeerDetail) -> DecodePeer | None:
        if self._is_closed:
            return None
        peer = self._peers.get(detail.kv_endpoint)
        if peer is not None and (peer.is_up or peer.expected == party_of(detail)):
            peer.detail = detail  # a restarted worker may reuse its predecessor's endpoint
            return peer
        if peer is not None:
            # The link expects the key of another rank, so it would never connect to this one.
            peer.fail_all()
            self._close(self._peers.pop(detail.kv_endpoint))
        try:
            peer = DecodePeer(
                *(detail, self._identity, self.plane, self._clock()),
                segment_traffic=self._segment_traffic,
            )
        except (OSError, ConfigError) as error:
            log.error("cannot connect to a worker", worker=party_of(detail), reason=str(error))
            return None
        self._peers[detail.kv_endpoint] = peer
        return peer

    def _close(self, peer: DecodePeer) -> None:
        task = asyncio.create_task(peer.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
