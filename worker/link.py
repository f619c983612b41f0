"""A worker's connection to one router: registration, timeouts, and requests passed to the role.

The worker sends HELLO when the connection is established, or when the router replies that it does
not know the worker.  WELCOME makes the link ready.  If the router refuses the worker, for example
because it serves another model, the link stays refused.  FENCED (another worker has this rank) is
retried first: the other worker may be dead without the router having noticed.  When a router is
lost, its requests are cancelled.  SPEC 5.
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
    DrainAsk,
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
# How many HELLOs a fenced worker sends during the time that the router names.
FENCED_TRIES: Final = 3
# Error codes that one worker sends another about a transfer; the router gets TRANSFER_FAILED
# instead.  CANCELLED: the other worker lost the router, which may not have noticed it yet.
BETWEEN_WORKERS: Final = frozenset(
    {ErrorCode.PROTOCOL, ErrorCode.UNKNOWN_REQUEST, ErrorCode.UNKNOWN_PEER, ErrorCode.CANCELLED}
)
# A router is lost after three heartbeats without any message, but not before this time: it may miss
# short heartbeats while it parses a huge prompt.  A closed connection is noticed at once.
MIN_SILENCE_S: Final = 3.0
# If no WELCOME arrives, HELLO is sent again after HELLO_AGAIN_S, and after REOPEN_S on a new
# connection.  The router never reads a connection that it accepted before it noticed the end of an
# older one with the same identity.  A router that was only suspended reads the third connection.
# One that was cut off from the network notices the end after 25 to 30 s.  The times increase
# because a handshake with keys costs the router 1 ms, and all workers may reconnect at once.
HELLO_AGAIN_S: Final = 3.0
REOPEN_S: Final = (3.0, 6.0, 10.0)
# Interval between warnings about an unreachable router.
UNREACHED_AGAIN_S: Final = 5.0
HINT: Final = "is it running, is --router its --bus, do --keys fit? trying on"


class Requests(Protocol):
    """Handles a router's frames: a role (`worker.roles`).

    `on_request` raises WireError to refuse one; `on_router_lost` ends all requests of the router.
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
    """The connection to one router, and its state."""

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
    is_fenced: bool = False  # whether the refusal was FENCED
    drain_s: float | None = None  # set when this worker starts to drain
    is_drained: bool = False
    # What the router has asked of this worker by DRAIN.
    asked: DrainAsk = DrainAsk.NOTHING
    # The router leaves: its requests go on here, and its successor is met at the same endpoint.
    is_leaving: bool = False
    _silent_s: float = 0.0
    _hello_due_s: float = 0.0  # time until the next HELLO or warning
    _num_reopened: int = 0  # since the last WELCOME
    _fenced_s: float | None = None  # remaining time for the router to notice a dead worker
    _is_stuck: bool = False  # whether the router does not read, so that a frame was dropped
    _link: Connection | None = None

    def open(self) -> None:
        """Connect, and send HELLO as soon as the connection is up.  Raises OSError."""
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
        """Check timeouts, `elapsed_s` after the last call: reconnect to an unresponsive router.

        Time is counted in calls, so that a pause of this process is not taken for the router's.
        """
        self._silent_s += elapsed_s
        self._hello_due_s -= elapsed_s
        if self._fenced_s is not None:
            self._fenced_s -= elapsed_s
        if self.state is LinkState.READY:
            is_silent = self._silent_s > max(3 * self.heartbeat_s, MIN_SILENCE_S)
            if is_silent or self._is_stuck:
                self._on_lost("it says nothing" if is_silent else "it does not read")
                await self._reopen()
        elif self.state is LinkState.JOINING and self._link is not None:
            if not self._link.is_up:
                self._log_unreachable()
            elif self._silent_s > REOPEN_S[min(self._num_reopened, len(REOPEN_S) - 1)]:
                self._num_reopened += 1
                await self._reopen()
            elif self._hello_due_s <= 0:
                if self._fenced_s is None and not self._num_reopened:
                    log.warning("no WELCOME from the router yet", router=self.endpoint)
                self._send_hello()
        elif self.is_fenced and self._hello_due_s <= 0:
            # Keep trying.  Another router has accepted this worker: otherwise it would have ended.
            self._send_hello()

    def reopen_soon(self) -> None:
        """Connect again at the next tick, if the router has not replied to HELLO."""
        if self.state is LinkState.JOINING:
            self._silent_s = REOPEN_S[-1]

    def send(self, frames: Frame | list[Frame], *payload: Buffer) -> None:
        """Send frames; drop them if the router is lost or too slow, as its requests end anyway."""
        if self._is_stuck:
            return  # a frame was dropped, so no later frame may be sent
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
        """End a request with an ERROR frame; the error's message is shown to the client."""
        is_between_workers = stage == "transfer" and error.code in BETWEEN_WORKERS
        code = ErrorCode.TRANSFER_FAILED if is_between_workers else error.code
        detail = ErrorDetail(message=error.message, stage=stage, worker=str(self.identity))
        self.send(Error(request_id, code), encode_map(detail))

    def drain(self, deadline_s: float) -> None:
        """Send DRAIN; `is_drained` is set when the router confirms that all requests have ended."""
        self.drain_s = deadline_s
        self.is_drained = self.state is not LinkState.READY
        if not self.is_drained:
            self.send(Drain(self.identity.epoch, int(deadline_s * 1000)))

    # The connection.

    def _on_up(self) -> None:
        self._silent_s = 0.0
        self._send_hello()

    def _send_hello(self) -> None:
        if self.is_leaving or (self.state is LinkState.REFUSED and not self.is_fenced):
            return
        self._hello_due_s = HELLO_AGAIN_S
        hello = Hello(self.identity.epoch, self.identity.rank, self.identity.role)
        self.send(hello, encode_map(self.detail))

    def _log_unreachable(self) -> None:
        """Log every UNREACHED_AGAIN_S that the router cannot be reached; the link keeps trying."""
        if self._hello_due_s <= 0:
            self._hello_due_s = UNREACHED_AGAIN_S
            waited = f"{self._silent_s:.0f} s"
            log.warning("cannot reach the router", router=self.endpoint, waited=waited, hint=HINT)

    def _on_down(self) -> None:
        self._silent_s, self._is_stuck = 0.0, False
        if self.state is LinkState.READY:
            self._on_lost("its connection closed")

    def _on_lost(self, reason: str) -> None:
        if self.is_leaving:
            log.info("the router has left", router=self.endpoint)
        else:
            log.warning("router lost", router=self.endpoint, reason=reason)
        self.is_drained = self.drain_s is not None
        self.requests.on_router_lost(self)
        self._set_state(LinkState.JOINING)

    async def _reopen(self) -> None:
        # Logged once: a router that this worker reaches by another link too never answers here.
        if self._num_reopened <= 1:
            log.warning("connecting to the router anew, until it answers", router=self.endpoint)
        await self.close(0.0)
        self.open()

    def _set_state(self, state: LinkState) -> None:
        self.state = state
        self.on_state(self)

    # Frames of the router.

    def _on_message(self, parts: list[Buffer]) -> None:
        self._silent_s = 0.0
        try:
            self._dispatch(decode(parts))
        except RemoteProtocolError as error:
            log.warning("bad frame from router", router=self.endpoint, reason=error.message)
            self.refuse(0, error, "router")

    def _dispatch(self, message: Message) -> None:
        frame = message.frame
        match frame:
            case PrefillRequest() | DecodeRequest():
                self._on_request(frame, message)
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
                self._on_drain(frame)
            case Error():
                self._on_error(frame, decode_error(message.body()))
            case _:
                raise RemoteProtocolError(f"a router does not send {frame.tag.name}")

    def _on_request(self, frame: PrefillRequest | DecodeRequest, message: Message) -> None:
        try:
            self.requests.on_request(self, message)
        except WireError as error:
            stage = "prefill" if isinstance(frame, PrefillRequest) else "decode"
            self.refuse(frame.request_id, error, stage)

    def _on_peers(self, frame: Peers, peers: list[PeerDetail]) -> None:
        if frame.num_peers != len(peers):
            raise RemoteProtocolError(f"PEERS: {len(peers)} entries, not {frame.num_peers}")
        self.requests.on_peers(self, peers)

    def _on_drain(self, frame: Drain) -> None:
        """Take the confirmation of our own DRAIN, a request for one, or the router's own."""
        if frame.epoch == self.identity.epoch:
            self.asked = self.asked or DrainAsk(frame.ask)
            self.is_drained = self.is_drained or not frame.ask
        elif frame.epoch == self.epoch and not frame.ask:
            self.is_leaving = True
        else:
            said = f"epoch is {frame.epoch}, not {self.identity.epoch}"
            raise RemoteProtocolError(f"DRAIN: {said}")
        self.on_state(self)

    def _on_welcome(self, frame: Welcome, detail: WelcomeDetail) -> None:
        if self.state is LinkState.REFUSED and not self.is_fenced:
            return
        if self.epoch not in (0, frame.epoch):
            self.requests.on_router_lost(self)
        self.epoch, self._fenced_s, self.is_fenced = frame.epoch, None, False
        self._num_reopened = 0
        self.heartbeat_s = frame.heartbeat_ms / 1000
        self.lease_s = frame.lease_ms / 1000
        log.info("registered", router=self.endpoint, max_kv=detail.max_kv_transfer_bytes)
        self.requests.on_registered(self)
        self._set_state(LinkState.READY)
        if self.drain_s is not None:
            self.drain(self.drain_s)

    def _on_error(self, frame: Error, detail: ErrorDetail) -> None:
        if frame.code == ErrorCode.UNKNOWN_PEER:
            self._on_unknown()
        elif frame.request_id == 0 and frame.code == ErrorCode.FENCED and self._may_retry(detail):
            if self.state is LinkState.READY:
                self._on_lost("another worker has our rank")
        elif frame.code in FATAL_CODES and frame.request_id == 0:
            self.refusal, was_fenced = detail.message, self.is_fenced
            self.is_fenced = frame.code == ErrorCode.FENCED
            if was_fenced and self.is_fenced:
                return  # it was fenced before
            self.requests.on_router_lost(self)
            self._set_state(LinkState.REFUSED)
        else:
            log.warning("error from router", router=self.endpoint, message=detail.message)

    def _may_retry(self, detail: ErrorDetail) -> bool:
        """Schedule another HELLO; return whether the other worker with this rank may be dead.

        The router's `retry_after_s` is how long it needs to notice a dead machine.
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
        """Register again after UNKNOWN_PEER, but send only one HELLO.

        The router sends UNKNOWN_PEER for every frame of a worker that it does not know, and
        a second HELLO would end the requests that started after the first one.
        """
        if self.state is LinkState.READY:
            self._on_lost("it does not know us")
            self._send_hello()
