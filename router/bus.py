"""The router's end of the bus, on which workers join, send heartbeats and drain.  SPEC 5.

Frames about requests go to `Dispatcher`.  An unknown peer gets an error that tells it to send
HELLO.  A peer that violates the protocol is disconnected and must join again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from router.core.dispatcher import Dispatcher
from router.core.fleet import Fleet, Worker, WorkerState
from router.core.prefixes import PrefixIndex
from router.core.replies import MAX_LOGGED
from router.core.state import Limits, RequestIds
from wire.errors import ErrorCode, PeerLost, RemoteProtocolError, WireError
from wire.frames import (
    VERSION,
    Drain,
    DrainAsk,
    Error,
    Frame,
    Heartbeat,
    Hello,
    Peers,
    Role,
    Tag,
    Welcome,
)
from wire.parts import Buffer, Message, decode, encode
from wire.payloads import (
    ErrorDetail,
    HelloDetail,
    Load,
    WelcomeDetail,
    decode_error,
    decode_map,
    encode_map,
)

log = structlog.get_logger("router")

# For each of these frames, the only role that sends it.
_ANSWERED_BY: Final = {
    Tag.DECODE_TOKEN: Role.DECODE,
    Tag.DECODE_DONE: Role.DECODE,
}
# Longer messages would delay the event loop.  The longest valid message, with the logprobs of
# MAX_HEADERS tokens, has 1.4 MiB.
MAX_MESSAGE_BYTES: Final = 2 << 20


@dataclass(eq=False, repr=False)
class Bus:
    """Handles the messages of the socket that all workers connect to.

    `transmit(peer, parts)` sends a message and may raise WireError.  `forget(peer)` closes a
    connection and drops its queued messages.  The owner of the socket must call `on_message` and
    `on_lost`, and `tick` several times a second.
    """

    fleet: Fleet
    transmit: Callable[[bytes, list[Buffer]], object]
    forget: Callable[[bytes], None]
    limits: Limits
    lease_ms: int
    request_ids: RequestIds
    clock: Callable[[], float]
    _next_beat: float = 0.0
    # Workers whose send queue is full; `tick` drops them, as callers of `send` still use them.
    _stuck: set[bytes] = field(default_factory=set)
    _warned_of: Sequence[str] = ()  # the kinds of arithmetic in the last warning

    def __post_init__(self) -> None:
        self.index = PrefixIndex()
        self.dispatcher = Dispatcher(
            *(self.fleet, self.index, self.send),
            limits=self.limits,
            request_ids=self.request_ids,
            clock=self.clock,
        )

    def send(self, peer: bytes, frames: Frame | Sequence[Frame], *payload: Buffer) -> None:
        """Send to a worker.  If it is gone, do nothing: `on_lost` or `tick` will remove it."""
        try:
            self.transmit(peer, encode(frames, *payload))
        except PeerLost:
            log.debug("frame for a worker that is gone", worker=_name(peer))
        except WireError as error:
            if error.code is not ErrorCode.OVERLOADED:
                raise
            self._stuck.add(peer)

    def on_message(self, peer: bytes, parts: list[Buffer]) -> None:
        try:
            if (num_bytes := sum(map(len, parts))) > MAX_MESSAGE_BYTES:
                raise RemoteProtocolError(f"a message of {num_bytes} bytes")
            message, worker = decode(parts), self.fleet.get(peer)
            if isinstance(message.frame, Hello):
                self._on_hello(peer, message.frame, message.body())
            elif worker is None:
                self.send_error(peer, ErrorCode.UNKNOWN_PEER, "say HELLO first")
            else:
                self._dispatch(worker, message)
        except RemoteProtocolError as error:
            log.warning("peer broke the protocol", peer=_name(peer), reason=error.message)
            self.send_error(peer, error.code, error.message)
            self.forget(peer)
            self.lose(peer, "it broke the protocol")

    def on_lost(self, peer: bytes) -> None:
        self.lose(peer, "its connection closed")

    def lose(self, peer: bytes, reason: str) -> None:
        """Remove a worker and fail its attempts.  Ignore an unknown peer."""
        worker = self.fleet.get(peer)
        if worker is None:
            return
        if worker.state is WorkerState.DRAINING and not worker.attempts:
            log.info("worker left", worker=worker.name, epoch=worker.epoch)
        else:
            log.warning("worker lost", worker=worker.name, epoch=worker.epoch, reason=reason)
        self.fleet.lose(peer, reason)
        self._on_removed(worker)

    def tick(self) -> None:
        """Send heartbeats when due, and remove workers that stopped sending or reading."""
        now = self.clock()
        for worker in self.fleet.overdue(now):
            self.lose(worker.identity, f"silent for {now - worker.last_heard:.1f} s")
        while self._stuck:
            peer = self._stuck.pop()
            self.forget(peer)
            self.lose(peer, "its queue is full")
        if now >= self._next_beat:
            self._next_beat = now + self.fleet.heartbeat_s
            self.fleet.update_costs()
            for worker in self.fleet.live:
                self.send(worker.identity, Heartbeat(0, len(worker.attempts), 0))
        self.dispatcher.tick()

    def ask_to_drain(self, worker: Worker, ask: DrainAsk) -> None:
        """Ask a worker to drain and then to end; its own DRAIN follows."""
        log.info("worker asked to drain", worker=worker.name, then=ask.name.lower())
        self.send(worker.identity, Drain(worker.epoch, 0, ask))

    def announce_successor(self) -> None:
        """Tell all workers that this router leaves and another takes over its endpoint."""
        for worker in self.fleet.live:
            self.send(worker.identity, Drain(self.request_ids.epoch, 0))

    def send_error(self, peer: bytes, code: ErrorCode, message: str) -> None:
        # After that time the rank is free if the worker that has it is dead.
        again_s = self.fleet.fence_s if code is ErrorCode.FENCED else None
        detail = ErrorDetail(message=message, stage="router", retry_after_s=again_s)
        self.send(peer, Error(0, code), encode_map(detail))

    def _dispatch(self, worker: Worker, message: Message) -> None:
        frame, worker.last_heard = message.frame, self.clock()
        if not worker.can(_ANSWERED_BY.get(frame.tag, worker.role)):
            raise RemoteProtocolError(f"{worker.name} is not one that sends {frame.tag.name}")
        if isinstance(frame, Heartbeat):
            self._on_heartbeat(worker, frame, message.body())
        elif isinstance(frame, Drain):
            if frame.epoch != worker.epoch or frame.ask:
                raise RemoteProtocolError("DRAIN: of another worker, or asks something of a router")
            if worker.state is not WorkerState.DRAINING:
                log.info("worker drains", worker=worker.name, requests=len(worker.attempts))
            self.fleet.drain(worker.identity)
            self.dispatcher.on_drain(worker)
        elif isinstance(frame, Error) and frame.request_id == 0:
            log.warning(
                "error from worker",
                worker=_name(worker.identity),
                code=frame.code,
                reason=decode_error(message.body()).message[:MAX_LOGGED],
            )
        else:
            self.dispatcher.on_message(worker.identity, message)

    def _on_hello(self, peer: bytes, hello: Hello, body: Buffer) -> None:
        """Register a worker and send WELCOME and PEERS, or refuse it with an error."""
        try:
            if hello.version != VERSION:  # the payload may be of another type
                raise WireError(
                    ErrorCode.MISMATCH,
                    f"protocol version {hello.version}, the router speaks {VERSION}; "
                    "install the same release of baton-serve on both",
                )
            detail = decode_map(HelloDetail, body)
            worker, replaced = self.fleet.hello(peer, hello, detail, self.clock())
        except RemoteProtocolError:
            raise
        except WireError as error:
            log.warning("worker refused", worker=_name(peer), reason=error.message)
            name = _name(peer).rpartition("-")[0]
            self.fleet.refusals.add(name, error.message, self.clock())
            self.send_error(peer, error.code, error.message)
            return
        if replaced is not None:
            log.warning("worker replaced", worker=worker.name, epoch=replaced.epoch)
            if replaced.identity != peer:
                self.send_error(
                    replaced.identity,
                    ErrorCode.FENCED,
                    f"{worker.name} fell silent, and another one has its rank now "
                    f"(epoch {worker.epoch}); stop this one or give it another --rank",
                )
            self._on_removed(replaced)
        self.fleet.refusals.forget(worker.name)
        log.info("worker joined", worker=worker.name, epoch=worker.epoch, blocks=detail.num_blocks)
        self._compare_arithmetic()
        welcome = Welcome(
            self.request_ids.epoch, round(self.fleet.heartbeat_s * 1000), self.lease_ms
        )
        limit = WelcomeDetail(max_kv_transfer_bytes=self.fleet.own_max_kv_transfer_bytes)
        self.send(peer, welcome, encode_map(limit))
        self.index.add(peer, detail.num_blocks + detail.num_tier_blocks)
        self._send_peers(self.fleet.live if worker.can(Role.DECODE) else [worker])

    def _compare_arithmetic(self) -> None:
        """Log a warning if workers may compute different outputs, once per set of workers."""
        names = self.fleet.arithmetics
        if len(names) > 1 and names != self._warned_of:
            self._warned_of = names
            log.warning(
                "workers compute differently: a request that fails and goes on elsewhere, or is "
                "asked again with the same seed, may get a number that is rounded otherwise, and "
                "so another token",
                arithmetic=names,
            )

    def _on_heartbeat(self, worker: Worker, beat: Heartbeat, body: Buffer) -> None:
        load = decode_map(Load, body)
        peer, was_stalled = worker.identity, worker.is_stalled
        self.fleet.heartbeat(peer, beat, load, self.clock())
        if worker.is_stalled and not was_stalled:
            log.warning("worker stands still", worker=worker.name, step_ms=load.step_ms)
            self.dispatcher.on_lost(peer)
        self.dispatcher.history.on_load(worker, load, self.clock())
        for _, hashes in load.losses:
            self.index.evict(peer, hashes)
        self.index.store(peer, load.stored)
        self.dispatcher.place_waiting()

    def _on_removed(self, worker: Worker) -> None:
        # If the same identity has joined again, `_on_hello` adds it after this.
        held = self.index.remove(worker.identity)
        self.dispatcher.history.on_worker_lost(worker, held, self.clock())
        if worker.can(Role.DECODE):
            self._send_peers(self.fleet.live)
        self.dispatcher.on_lost(worker.identity)

    def _send_peers(self, workers: list[Worker]) -> None:
        peers = self.fleet.peers()
        payload = encode_map(peers)
        for worker in workers:
            self.send(worker.identity, Peers(self.request_ids.epoch, len(peers)), payload)


def _name(peer: bytes) -> str:
    return peer.decode("ascii", errors="backslashreplace")[:64]
