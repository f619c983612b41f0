"""A worker's connection to one router: registration, heartbeats, and requests passed to the role.

The worker says HELLO when the connection comes up or the router does not know it; WELCOME makes it
ready.  A refusal (another model) is fatal.  FENCED is fatal too, but not at once: the worker that
has our rank may be dead without the router having noticed.  The requests of a lost router end.
SPEC 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import structlog

from wire.aio.zmq import Link
from wire.errors import ErrorCode, PeerLost, RemoteProtocolError, WireError
from wire.frames import (
    Cancel,
    DecodeRequest,
    Drain,
    Error,
    Frame,
    Heartbeat,
    Hello,
    Peers,
    PrefillRequest,
    Welcome,
)
from wire.identity import Identity
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
from worker.environment import Connect, Connection

log = structlog.get_logger("worker")

FATAL_CODES: Final = frozenset({ErrorCode.MISMATCH, ErrorCode.FENCED, ErrorCode.UNAUTHORIZED})
# A fenced worker says HELLO so many times while it waits for its rank.
FENCED_TRIES: Final = 3
# Codes with which one worker refuses another; the router is told TRANSFER_FAILED in their place.
# CANCELLED: the other worker has lost the router, which may not have noticed it yet.
BETWEEN_WORKERS: Final = frozenset(
    {
        ErrorCode.PROTOCOL,
        ErrorCode.UNKNOWN_REQUEST,
        ErrorCode.UNKNOWN_PEER,
        ErrorCode.CANCELLED,
    }
)
# A router that is silent for three heartbeats is lost, but not before so many seconds: it may miss
# quick ones while it reads a huge prompt.  A connection that closes is noticed at once.
MIN_SILENCE_S: Final = 3.0
# An unanswered HELLO is repeated, and then on another connection: a router never reads the second
# connection of one identity.  A router that stood still accepts the second before it has read the
# end of the first, and reads the third.  One that was cut off needs 25 to 30 s to see that the
# first is gone.  A handshake costs it 1 ms with keys, and all workers may come at once: so each
# connection gets more time than the one before.
HELLO_AGAIN_S: Final = 3.0
REOPEN_S: Final = (3.0, 6.0, 10.0)
# A router that cannot be reached is named this often.
UNREACHED_AGAIN_S: Final = 5.0
HINT: Final = "is it running, is --router its --bus, do --keys fit? trying on"


class Requests(Protocol):
    """The handler of a router's frames: a role.

    `on_request` raises WireError to refuse a request; `on_router_lost` ends all of a router's.
    """

    def on_registered(self, router: RouterLink) -> None: ...
    def on_request(self, router: RouterLink, message: Message) -> None: ...
    def on_cancel(self, request_id: int) -> None: ...
    def on_peers(self, router: RouterLink, peers: list[PeerDetail]) -> None: ...
    def on_router_lost(self, router: RouterLink) -> None: ...


class LinkState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    REFUSED = "refused"


@dataclass(eq=False)
class RouterLink:
    """One router, as this worker sees it."""

    endpoint: str
    identity: Identity
    detail: HelloDetail
    requests: Requests
    on_state: Callable[[RouterLink], None]
    connect: Connect = Link
    state: LinkState = LinkState.JOINING
    epoch: int = 0
    heartbeat_s: float = 1.0
    lease_s: float = 30.0
    refusal: str = ""
    is_fenced: bool = False  # its refusal was FENCED, and no other
    drain_s: float | None = None  # set once we are leaving
    is_drained: bool = False
    _silent_s: float = 0.0
    _hello_due_s: float = 0.0
    _num_unheard: int = 0  # connections since the last WELCOME that were made anew
    _fenced_s: float | None = None  # what is left of waiting for a dead worker to be noticed
    _is_stuck: bool = False
    _link: Connection | None = None

    def open(self) -> None:
        """Connect, and say HELLO as soon as the connection is up.  Raises OSError."""
        self._silent_s, self._is_stuck = 0.0, False
        self._hello_due_s = HELLO_AGAIN_S
        self._link = self.connect(
            self.identity.name,
            self.endpoint,
            self._on_message,
            on_up=self._on_up,
            on_down=self._on_down,
        )

    async def close(self, linger_s: float) -> None:
        if self._link is not None:
            await self._link.close(linger_s)

    async def tick(self, elapsed_s: float) -> None:
        """Notice a router that sends nothing or does not read; `elapsed_s` since the last call.

        Time is counted in calls, so that a pause of this process is not taken for the router's.
        """
        self._silent_s += elapsed_s
        self._hello_due_s -= elapsed_s
        if self._fenced_s is not None:
            self._fenced_s -= elapsed_s
        if self.state is LinkState.READY:
            is_silent = self._silent_s > max(3 * self.heartbeat_s, MIN_SILENCE_S)
            if is_silent or self._is_stuck:
                self._lose("it says nothing" if is_silent else "it does not read")
                await self._reopen()
        elif self.state is LinkState.JOINING and self._link is not None:
            if not self._link.is_up:
                self._complain()
            elif self._silent_s > REOPEN_S[min(self._num_unheard, len(REOPEN_S) - 1)]:
                self._num_unheard += 1
                await self._reopen()
            elif self._hello_due_s <= 0:
                if self._fenced_s is None:
                    log.warning("no WELCOME from the router yet", router=self.endpoint)
                self._say_hello()
        elif self.is_fenced and self._hello_due_s <= 0:
            # Another router has accepted us, or this process would have ended: keep trying here.
            self._say_hello()

    def send(self, frames: Frame | list[Frame], *payload: Buffer) -> None:
        """Send to the router; dropped if its connection is down, for then it is lost anyway."""
        if self._is_stuck:
            return  # a frame is missing already: nothing may follow it
        assert self._link is not None, "open comes first"
        try:
            self._link.send(encode(frames, *payload))
        except WireError as error:
            if isinstance(error, PeerLost):
                log.debug("router is away, frame dropped", router=self.endpoint)
            elif error.code is ErrorCode.OVERLOADED:
                self._is_stuck = True
            else:
                raise

    def refuse(self, request_id: int, error: WireError, stage: str) -> None:
        """End a request with ERROR; the text is for the client."""
        is_ours = stage == "transfer" and error.code in BETWEEN_WORKERS
        code = ErrorCode.TRANSFER_FAILED if is_ours else error.code
        detail = ErrorDetail(message=error.message, stage=stage, worker=str(self.identity))
        self.send(Error(request_id, code), encode_map(detail))

    def drain(self, deadline_s: float) -> None:
        """Ask for no more work; `is_drained` turns true when the router has none left here."""
        self.drain_s = deadline_s
        self.is_drained = self.state is not LinkState.READY
        if not self.is_drained:
            self.send(Drain(self.identity.epoch, int(deadline_s * 1000)))

    # The connection.

    def _on_up(self) -> None:
        self._silent_s = 0.0
        self._say_hello()

    def _say_hello(self) -> None:
        if self.state is LinkState.REFUSED and not self.is_fenced:
            return
        self._hello_due_s = HELLO_AGAIN_S
        hello = Hello(self.identity.epoch, self.identity.rank, self.identity.role)
        self.send(hello, encode_map(self.detail))

    def _complain(self) -> None:
        """Log from time to time that the router cannot be reached; the link keeps trying."""
        if self._hello_due_s <= 0:
            self._hello_due_s = UNREACHED_AGAIN_S
            waited = f"{self._silent_s:.0f} s"
            log.warning("cannot reach the router", router=self.endpoint, waited=waited, hint=HINT)

    def _on_down(self) -> None:
        self._silent_s, self._is_stuck = 0.0, False
        if self.state is LinkState.READY:
            self._lose("its connection closed")

    def _lose(self, reason: str) -> None:
        log.warning("router lost", router=self.endpoint, reason=reason)
        self.is_drained = self.drain_s is not None
        self.requests.on_router_lost(self)
        self._become(LinkState.JOINING)

    async def _reopen(self) -> None:
        log.warning("connecting to the router anew", router=self.endpoint)
        await self.close(0.0)
        self.open()

    def _become(self, state: LinkState) -> None:
        self.state = state
        self.on_state(self)

    # Frames of the router.

    def _on_message(self, parts: list[Buffer]) -> None:
        self._silent_s = 0.0
        try:
            self._dispatch(decode(parts))
        except RemoteProtocolError as error:
            log.warning("bad frame from router", router=self.endpoint, reason=error.message)
            self.refuse(0, error, self.identity.role.name.lower())

    def _dispatch(self, message: Message) -> None:
        frame = message.frame
        match frame:
            case PrefillRequest() | DecodeRequest():
                self._on_request(frame.request_id, message)
            case Cancel():
                self.requests.on_cancel(frame.request_id)
            case Heartbeat():
                if frame.step or frame.waiting:
                    said = f"step is {frame.step} and waiting {frame.waiting}, not 0"
                    raise RemoteProtocolError(f"HEARTBEAT of a router: {said}")
            case Peers():
                self._on_peers(frame, decode_map(list[PeerDetail], message.body()))
            case Welcome():
                self._on_welcome(frame, decode_map(WelcomeDetail, message.body()))
            case Drain():
                if frame.epoch != self.identity.epoch:
                    said = f"epoch is {frame.epoch}, not {self.identity.epoch}"
                    raise RemoteProtocolError(f"DRAIN: {said}")
                self.is_drained = True
                self.on_state(self)
            case Error():
                self._on_error(frame, decode_error(message.body()))
            case _:
                raise RemoteProtocolError(f"a router does not send {frame.tag.name}")

    def _on_request(self, request_id: int, message: Message) -> None:
        try:
            self.requests.on_request(self, message)
        except WireError as error:
            self.refuse(request_id, error, self.identity.role.name.lower())

    def _on_peers(self, frame: Peers, peers: list[PeerDetail]) -> None:
        if frame.num_peers != len(peers):
            raise RemoteProtocolError(f"PEERS: {len(peers)} entries, not {frame.num_peers}")
        self.requests.on_peers(self, peers)

    def _on_welcome(self, frame: Welcome, detail: WelcomeDetail) -> None:
        if self.state is LinkState.REFUSED and not self.is_fenced:
            return
        if self.epoch not in (0, frame.epoch):
            self.requests.on_router_lost(self)
        self.epoch, self._fenced_s, self.is_fenced = frame.epoch, None, False
        self._num_unheard = 0
        self.heartbeat_s = frame.heartbeat_ms / 1000
        self.lease_s = frame.lease_ms / 1000
        log.info("registered", router=self.endpoint, max_kv=detail.max_kv_transfer_bytes)
        self.requests.on_registered(self)
        self._become(LinkState.READY)
        if self.drain_s is not None:
            self.drain(self.drain_s)

    def _on_error(self, frame: Error, detail: ErrorDetail) -> None:
        if frame.code == ErrorCode.UNKNOWN_PEER:
            self._on_unknown()
        elif frame.request_id == 0 and frame.code == ErrorCode.FENCED and self._may_wait(detail):
            if self.state is LinkState.READY:
                self._lose("another worker has our rank")
        elif frame.code in FATAL_CODES and frame.request_id == 0:
            self.refusal, was_fenced = detail.message, self.is_fenced
            self.is_fenced = frame.code == ErrorCode.FENCED
            if was_fenced and self.is_fenced:
                return  # it was fenced before
            self.requests.on_router_lost(self)
            self._become(LinkState.REFUSED)
        else:
            log.warning("error from router", router=self.endpoint, message=detail.message)

    def _may_wait(self, detail: ErrorDetail) -> bool:
        """Whether the worker with our rank may still turn out to be dead; if so, say HELLO again.

        The router says for how long: it notices a lost machine only by missing heartbeats.
        """
        if self._fenced_s is None:
            self._fenced_s = detail.retry_after_s or 0.0
            log.warning(
                "fenced", router=self.endpoint, reason=detail.message, wait_s=self._fenced_s
            )
        wait_s = detail.retry_after_s
        self._hello_due_s = wait_s / FENCED_TRIES if wait_s else HELLO_AGAIN_S
        return self._fenced_s > 0.0

    def _on_unknown(self) -> None:
        """Register again, once: the router sends this for every frame of an unknown worker.

        A second HELLO would end the requests that began after the first.
        """
        if self.state is LinkState.READY:
            self._lose("it does not know us")
            self._say_hello()
