"""A worker's connection to one router: it registers, stays registered, and passes requests on.

The worker says HELLO whenever the connection comes up or a router that does not know it asks for
one; WELCOME makes it ready.  A refusal (another model, an older epoch) is fatal: the router said
what to fix, and trying again would not help.  SPEC 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import structlog

from wire.aio.zmq import Link
from wire.errors import ErrorCode, PeerLost, RemoteProtocolError, WireError
from wire.frames import Cancel, Drain, Error, Frame, Hello, Role, Tag, Welcome
from wire.parts import Buffer, Message, decode, encode
from wire.payloads import (
    ErrorDetail,
    HelloDetail,
    PeerDetail,
    WelcomeDetail,
    decode_error,
    decode_map,
    encode_map,
)

log = structlog.get_logger("worker")

FATAL_CODES = frozenset({ErrorCode.MISMATCH, ErrorCode.FENCED, ErrorCode.UNAUTHORIZED})


class Requests(Protocol):
    """What a role does with the frames of a router."""

    def on_request(self, router: RouterLink, message: Message) -> None:
        """PREFILL_REQUEST or DECODE_REQUEST.  Raises WireError to refuse it."""

    def on_cancel(self, request_id: int) -> None:
        """The router wants nothing more of this request."""

    def on_peers(self, router: RouterLink, peers: list[PeerDetail]) -> None:
        """The decode workers that this router knows."""

    def on_router_changed(self, router: RouterLink) -> None:
        """A router with another epoch took over: it will never claim what the old one asked for."""


class LinkState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process of which rank this is."""

    role: Role
    rank: int
    epoch: int

    @property
    def name(self) -> bytes:
        """The ZeroMQ routing id: a restarted worker is another peer (SPEC 2.1)."""
        return f"{self}-{self.epoch}".encode()

    def __str__(self) -> str:
        return f"{self.role.name.lower()}-{self.rank}"


@dataclass(eq=False)
class RouterLink:
    """One router, as this worker sees it."""

    endpoint: str
    identity: Identity
    detail: HelloDetail
    requests: Requests
    on_state: Callable[[RouterLink], None]
    state: LinkState = LinkState.JOINING
    epoch: int = 0
    heartbeat_s: float = 1.0
    lease_s: float = 30.0
    refusal: str = ""
    is_draining: bool = False
    is_drained: bool = False
    _link: Link = field(init=False)

    def open(self) -> None:
        """Connect; HELLO goes out as soon as the router is there."""
        self._link = Link(
            self.identity.name,
            self.endpoint,
            self._on_message,
            on_up=self._say_hello,
            on_down=self._on_down,
        )

    async def close(self, linger_s: float) -> None:
        await self._link.close(linger_s)

    def send(self, frames: Frame | list[Frame], *payload: Buffer) -> None:
        """Send to the router; what a dead router would have got is of no use to anyone."""
        try:
            self._link.send(encode(frames, *payload))
        except PeerLost:
            log.debug("router is away, frame dropped", router=self.endpoint)

    def refuse(self, request_id: int, error: WireError, stage: str) -> None:
        """End a request with ERROR; the text is for the client."""
        detail = ErrorDetail(message=error.message, stage=stage, worker=str(self.identity))
        self.send(Error(request_id, error.code), encode_map(detail))

    def drain(self, deadline_s: float) -> None:
        """Ask for no more work; `is_drained` turns true when the router has none left here."""
        self.is_draining = True
        if self.state is LinkState.READY:
            self.send(Drain(self.identity.epoch, int(deadline_s * 1000)))
        else:
            self.is_drained = True

    def _say_hello(self) -> None:
        hello = Hello(self.identity.epoch, self.identity.rank, self.identity.role)
        self.send(hello, encode_map(self.detail))

    def _on_down(self) -> None:
        if self.state is LinkState.READY:
            log.warning("router lost", router=self.endpoint)
            self.is_drained = self.is_draining
            self._become(LinkState.JOINING)

    def _on_message(self, parts: list[Buffer]) -> None:
        try:
            message = decode(parts)
            self._dispatch(message)
        except RemoteProtocolError as error:
            log.warning("bad frame from router", router=self.endpoint, reason=error.message)

    def _dispatch(self, message: Message) -> None:
        frame = message.frame
        match frame.tag:
            case Tag.PREFILL_REQUEST | Tag.DECODE_REQUEST:
                self._on_request(message)
            case Tag.CANCEL:
                assert isinstance(frame, Cancel)
                self.requests.on_cancel(frame.request_id)
            case Tag.HEARTBEAT:
                pass
            case Tag.PEERS:
                self.requests.on_peers(self, decode_map(list[PeerDetail], message.body()))
            case Tag.WELCOME:
                assert isinstance(frame, Welcome)
                self._on_welcome(frame, decode_map(WelcomeDetail, message.body()))
            case Tag.DRAIN:
                self.is_drained = True
                self.on_state(self)
            case Tag.ERROR:
                assert isinstance(frame, Error)
                self._on_error(frame, decode_error(message.body()))
            case _:
                raise RemoteProtocolError(f"a router does not send {frame.tag.name}")

    def _on_request(self, message: Message) -> None:
        request_id: int = message.frame.request_id  # type: ignore[attr-defined]
        try:
            self.requests.on_request(self, message)
        except WireError as error:
            self.refuse(request_id, error, self.identity.role.name.lower())

    def _on_welcome(self, frame: Welcome, detail: WelcomeDetail) -> None:
        if self.epoch not in (0, frame.epoch):
            self.requests.on_router_changed(self)
        self.epoch = frame.epoch
        self.heartbeat_s = frame.heartbeat_ms / 1000
        self.lease_s = frame.lease_ms / 1000
        log.info("registered", router=self.endpoint, max_kv=detail.max_kv_transfer_bytes)
        self._become(LinkState.READY)

    def _on_error(self, frame: Error, detail: ErrorDetail) -> None:
        if frame.code == ErrorCode.UNKNOWN_PEER:
            self._say_hello()
        elif frame.code in FATAL_CODES and frame.request_id == 0:
            self.refusal = detail.message
            self._become(LinkState.REFUSED)
        else:
            log.warning("error from router", router=self.endpoint, message=detail.message)

    def _become(self, state: LinkState) -> None:
        self.state = state
        self.on_state(self)
