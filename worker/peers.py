"""The decode workers a prefill worker hands KV to, as the routers' PEERS frames name them.

One link a decode worker, whichever routers know it.  A decode worker that no router names any more
is let go once nothing is under way to it.  SPEC 5.4.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from wire.aio.zmq import Link, Sending
from wire.errors import PeerLost, RemoteProtocolError, WireError
from wire.frames import ANY_RANK, Error, Frame, KvCacheAck
from wire.parts import Buffer, decode, encode
from wire.payloads import Credit, PeerDetail, decode_error

log = structlog.get_logger("worker")


class Receiver(Protocol):
    """Who hears of a transfer's answers (`worker.handover`)."""

    def on_ack(self, ack: KvCacheAck, credit: Credit) -> None: ...
    def on_error(self, code: int, message: str) -> None: ...
    def fail(self, error: WireError) -> None: ...


class DecodePeer:
    """A decode worker, over one link."""

    def __init__(self, detail: PeerDetail, identity: bytes) -> None:
        self.detail = detail
        self.receivers: dict[int, Receiver] = {}  # by request id, while a transfer is under way
        self._link = Link(
            identity,
            detail.kv_endpoint,
            self._on_message,
            on_down=self._on_down,
            zero_copy=True,
        )

    @property
    def name(self) -> str:
        return f"decode-{self.detail.rank}"

    def send(self, frame: Frame, *payload: Buffer, track: bool = False) -> Sending | None:
        """Send, or drop what the peer cannot take: the transfer's lease ends it then."""
        try:
            return self._link.send(encode(frame, *payload), track=track)
        except WireError as error:
            log.warning("frame dropped", peer=self.name, tag=frame.tag.name, reason=error.message)
            return None

    async def close(self) -> None:
        await self._link.close(0.5)

    def _on_message(self, parts: list[Buffer]) -> None:
        try:
            message = decode(parts)
            frame = message.frame
            match frame:
                case KvCacheAck():
                    if receiver := self.receivers.get(frame.request_id):
                        receiver.on_ack(frame, Credit.unpack(message.body()))
                case Error():
                    if receiver := self.receivers.get(frame.request_id):
                        detail = decode_error(message.body())
                        receiver.on_error(frame.code, detail.message)
                case _:
                    raise RemoteProtocolError(f"a decode worker does not send {frame.tag.name}")
        except RemoteProtocolError as error:
            log.warning("bad frame from decode worker", peer=self.name, reason=error.message)

    def _on_down(self) -> None:
        for receiver in list(self.receivers.values()):
            receiver.fail(PeerLost(self.name))


class DecodePeers:
    """All decode workers known here, by router and rank."""

    def __init__(self, identity: bytes) -> None:
        self._identity = identity
        self._named: dict[str, list[PeerDetail]] = {}  # by router endpoint
        self._peers: dict[PeerDetail, DecodePeer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, router: str, details: list[PeerDetail]) -> None:
        """Take a PEERS frame of one router."""
        self._named[router] = details
        named = {detail for details in self._named.values() for detail in details}
        for detail in named - self._peers.keys():
            self._peers[detail] = DecodePeer(detail, self._identity)
        for detail in self._peers.keys() - named:
            if not self._peers[detail].receivers:
                self._close(self._peers.pop(detail))

    def find(self, router: str, rank: int) -> DecodePeer | None:
        """The decode worker of this rank, or for `ANY_RANK` any, that this router named."""
        for detail in self._named.get(router, ()):
            if rank in (detail.rank, ANY_RANK):
                return self._peers[detail]
        return None

    async def close(self) -> None:
        for peer in self._peers.values():
            self._close(peer)
        await asyncio.gather(*self._closing)

    def _close(self, peer: DecodePeer) -> None:
        task = asyncio.create_task(peer.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
