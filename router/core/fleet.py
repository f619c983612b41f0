"""The table of workers: admission, liveness and load.

A worker joins with HELLO and gets requests after its first HEARTBEAT, which contains the number of
free blocks.  It becomes suspect, and gets no requests, after a short silence or while its engine is
stalled.  It drains after sending DRAIN, and is lost after a longer silence or when its connection
closes.  No other worker can take the role and rank of a live one.  Limits in a HELLO apply to that
worker only.  This module does no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from typing import Final

from router.core.estimates import LATEST, Line
from router.core.refusals import Refusals
from wire.errors import ErrorCode, RemoteProtocolError, WireError
from wire.frames import NO_RANK, Heartbeat, Hello, Role
from wire.identity import Identity
from wire.layout import KVLayout
from wire.payloads import HelloDetail, Load, PeerDetail

# A worker is lost after this many heartbeat intervals of silence.
MISSED_BEATS: Final = 3
# After this many intervals it is suspect, and gets no more requests until its next heartbeat.
SUSPECT_BEATS: Final = 2
# This many lost workers, the latest ones, are listed until another worker takes their rank.
MAX_LOST: Final = 64
MAX_WORKERS: Final = 4096
# The attributes of a worker that are costs in seconds.
COSTS: Final = ("step_s", "token_s", "sequence_s", "transfer_s", "byte_s")


class WorkerState(StrEnum):
    """The state of a worker, as in `/v1/cluster`."""

    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process, and the attempts that this router has placed on it.

    `is_stalled` means that heartbeats arrive, but the engine has been in one step for too long.
    """

    identity: bytes
    role: Role
    rank: int
    epoch: int
    detail: HelloDetail
    # When its last HEARTBEAT and its last message came; a heartbeat may be queued behind tokens.
    last_seen: float
    last_heard: float
    state: WorkerState = WorkerState.JOINING
    # Breaks ties between workers of equal load: the lowest is chosen.
    turn: int = 0

    lost_why: str = ""
    is_stalled: bool = False

    # From its last HEARTBEAT.
    load: Load | None = None
    step: int = 0
    running: int = 0
    waiting: int = 0
    # The part of `running` and `waiting` that other routers placed.
    num_others: int = 0

    # Costs in seconds (`Fleet.update_costs`): of a step, of each prompt token and each sequence in
    # it, of a KV transfer to the worker, and of each byte of it.
    step_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    transfer_s: float = 0.0
    byte_s: float = 0.0

    # For this router only: the ids of its attempts on the worker, how many of them are being
    # computed, how many of those are in prefill, and the number of prompt tokens not yet prefilled.
    attempts: set[int] = field(default_factory=set)
    num_active: int = 0
    num_in_prefill: int = 0
    prefill_tokens: int = 0
    # When the current prefill started.
    prefill_since: float = 0.0
    # Blocks reserved for each attempt, and their sum, until a heartbeat counts them as used.
    promised: dict[int, int] = field(default_factory=dict)
    promised_blocks: int = 0
    # Blocks of attempts that were ended to free them, until a heartbeat counts them as free.
    returning_blocks: int = 0
    # Attempts whose blocks the worker allocated since its last heartbeat.
    _settling: set[int] = field(default_factory=set)
    # Bytes and seconds of the KV transfers to the worker.
    transfers: Line = field(default_factory=Line)
    # The measured costs, and those of steps as in the heartbeat that was measured last.
    measured: dict[str, float] = field(default_factory=dict)
    _steps: tuple[float | None, ...] | None = None

    @property
    def name(self) -> str:
        return f"{self.role.name.lower()}-{self.rank}"

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    def can(self, role: Role) -> bool:
        """Whether it serves requests in this role; `--role any` serves in both."""
        return self.role in (role, Role.ANY)

    @property
    def available_blocks(self) -> int:
        """The number of blocks for a new request: free and cached blocks minus reserved ones."""
        if self.load is None:
            return 0
        return self.load.free + self.load.cached - self.promised_blocks

    @property
    def free_tokens(self) -> int:
        """How many tokens fit into free blocks, without evicting cached ones."""
        return 0 if self.load is None else self.load.free * self.detail.block_size

    def prefill_wait_s(self, now: float) -> float:
        """Return how many seconds a new prompt waits until its prefill starts."""
        if not self.num_in_prefill:
            return 0.0
        unread_s = self.prefill_tokens * self.token_s
        return unread_s - min(now - self.prefill_since, unread_s / self.num_in_prefill)

    def measure(self) -> bool:
        """Update `measured` from the last heartbeat; return False if the engine made no step."""
        load = self.load
        steps = None if load is None else (load.step_s, load.token_s, load.sequence_s)
        if steps is None or steps == self._steps:
            return False
        self._steps = steps
        values = (*steps, *(self.transfers.fit() or (None, None)))
        self.measured |= {
            name: value for name, value in zip(COSTS, values, strict=True) if value is not None
        }
        return True

    def promise(self, request_id: int, num_blocks: int) -> None:
        """Reserve blocks for an attempt, until a heartbeat counts them as used."""
        self.promised[request_id] = num_blocks
        self.promised_blocks += num_blocks

    def settle(self, request_id: int) -> None:
        """Drop the attempt's reservation at the next heartbeat, which counts its blocks as used."""
        if request_id in self.promised:
            self._settling.add(request_id)

    def unpromise(self, request_id: int) -> None:
        """Drop the reservation of an attempt now.  Idempotent."""
        self.promised_blocks -= self.promised.pop(request_id, 0)
        self._settling.discard(request_id)

    def on_beat(self, beat: Heartbeat) -> None:
        """Store the step and the request counts of a heartbeat, which include other routers."""
        self.step, self.running, self.waiting = beat.step, beat.running, beat.waiting
        self.num_others = max(0, beat.running + beat.waiting - len(self.attempts))

    def on_load(self, load: Load) -> None:
        """Store the block counts of a heartbeat; drop the reservations they include."""
        self.load, self.returning_blocks = load, 0
        for request_id in tuple(self._settling):
            self.unpromise(request_id)


class Fleet:
    """The table of workers, by ZeroMQ identity.

    Args:
        max_kv_transfer_bytes: The router's own limit; workers may have a lower one.
        stall_s: An engine is stalled if one step takes longer than this.
        process: The index of this router process.  Each process breaks ties differently.

    Attributes:
        max_model_len: The longest sequence in tokens that both roles can serve; None without
            workers.
        last_max_model_len: The same, but kept after the last worker has left.
        block_sizes: The tokens of a block on the workers; one size, unless they differ.
        refusals: The workers that were refused and have not joined since.
    """

    def __init__(
        self,
        *,
        model_fingerprint: str,
        max_kv_transfer_bytes: int,
        heartbeat_s: float,
        stall_s: float = 60.0,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.model_fingerprint = model_fingerprint
        self.own_max_kv_transfer_bytes = max_kv_transfer_bytes
        self.heartbeat_s = heartbeat_s
        self.stall_s = stall_s
        self._process, self._num_processes = process, num_processes
        self.max_model_len: int | None = None
        self.last_max_model_len: int | None = None
        self.block_sizes: set[int] = set()
        self.refusals = Refusals()
        self._workers: dict[bytes, Worker] = {}
        # For each role, the largest KV transfer that one of its workers accepts.
        self._kv_bytes: list[int] = []
        self._looked_at: float | None = None  # when `overdue` was last called
        self._ranks: dict[tuple[Role, int], Worker] = {}  # by `_seat`
        self._lost: OrderedDict[tuple[Role, int], Worker] = OrderedDict()

    def __iter__(self) -> Iterator[Worker]:
        """Yield all workers, including lost ones whose rank is still free."""
        yield from self._workers.values()
        yield from self._lost.values()

    def get(self, identity: bytes) -> Worker | None:
        """Return the worker with this identity, or None if it is unknown or lost."""
        return self._workers.get(identity)

    @property
    def live(self) -> list[Worker]:
        return list(self._workers.values())

    def staying(self, role: Role) -> list[Worker]:
        """Return the workers of a role that are ready, or may become ready soon."""
        draining = WorkerState.DRAINING
        return [it for it in self.live if it.can(role) and it.state is not draining]

    def ready(self, role: Role) -> list[Worker]:
        """Return the workers of a role that requests may be placed on."""
        ready = WorkerState.READY
        return [it for it in self._workers.values() if it.state is ready and it.can(role)]

    @property
    def draining(self) -> list[Worker]:
        """The workers that are about to leave."""
        return [it for it in self._workers.values() if it.state is WorkerState.DRAINING]

    @property
    def layout(self) -> KVLayout | None:
        """The KV layout of all workers; None without workers."""
        return next((worker.detail.layout for worker in self._workers.values()), None)

    @property
    def max_kv_transfer_bytes(self) -> int:
        """The largest KV transfer in bytes that the router and both roles accept."""
        return min([self.own_max_kv_transfer_bytes, *self._kv_bytes])

    @property
    def fence_s(self) -> float:
        """How long a silent worker keeps its rank, in seconds."""
        return MISSED_BEATS * self.heartbeat_s

    def peers(self) -> list[PeerDetail]:
        """Return the decode workers for PEERS, with draining ones, which may be receiving KV."""
        return [
            PeerDetail(
                role="any" if worker.role is Role.ANY else "decode",
                rank=worker.rank,
                epoch=worker.epoch,
                kv_endpoint=worker.detail.kv_endpoint,
                block_size=worker.detail.block_size,
                kv_unasked_bytes=worker.detail.kv_unasked_bytes,
            )
            for worker in self._workers.values()
            if worker.can(Role.DECODE)
        ]

    @property
    def arithmetics(self) -> list[str]:
        """The distinct kinds of arithmetic of the workers; with one kind, all compute the same."""
        return sorted({worker.detail.arithmetic for worker in self._workers.values()})

    def hello(
        self, identity: bytes, hello: Hello, detail: HelloDetail, now: float
    ) -> tuple[Worker, Worker | None]:
        """Admit a worker; return it, and the silent or restarted worker that it replaced.

        Raises:
            WireError: MISMATCH, FENCED or OVERLOADED.  The message explains what to fix.
            RemoteProtocolError: HELLO does not match the ZeroMQ identity, for which the worker's
                key was authenticated.
        """
        if reason := self._mismatch(hello, detail):
            raise WireError(ErrorCode.MISMATCH, reason)
        role, rank = Role(hello.role), hello.rank
        if Identity.parse(identity) != Identity(role, rank, hello.epoch):
            raise RemoteProtocolError("HELLO names another worker than the ZeroMQ identity does")
        seat = _seat(role, rank)
        replaced = self._ranks.get(seat)
        if replaced is not None and replaced.identity != identity:
            self._fence(replaced, now)
        if replaced is None and len(self._workers) >= MAX_WORKERS:
            raise WireError(ErrorCode.OVERLOADED, f"there are {MAX_WORKERS} workers already")
        if replaced is not None:
            self.lose(replaced.identity)
        turn = (hello.rank - self._process) % self._num_processes
        worker = Worker(identity, role, rank, hello.epoch, detail, now, now, turn=turn)
        self._workers[identity] = self._ranks[seat] = worker
        self._lost.pop(seat, None)
        self._note_limits()
        self.update_costs()
        return worker, replaced

    def heartbeat(self, identity: bytes, beat: Heartbeat, load: Load, now: float) -> Worker | None:
        """Update the load of a worker and return it, or None if it is unknown.

        Raises:
            RemoteProtocolError: The block counts do not match HELLO.
        """
        worker = self._workers.get(identity)
        if worker is None:
            return None
        if not max(load.used, load.cached, load.free) <= load.total == worker.detail.num_blocks:
            raise RemoteProtocolError(
                f"HEARTBEAT: used {load.used}, cached {load.cached} and free {load.free} of "
                f"{load.total} blocks, and HELLO said {worker.detail.num_blocks}"
            )
        worker.last_seen = worker.last_heard = now
        worker.on_beat(beat)
        worker.on_load(load)
        worker.is_stalled = load.step_ms >= self.stall_s * 1000
        if worker.state is not WorkerState.DRAINING:
            worker.state = WorkerState.SUSPECT if worker.is_stalled else WorkerState.READY
        return worker

    def drain(self, identity: bytes) -> Worker | None:
        """Mark a worker as draining and return it, or None if it is unknown."""
        worker = self._workers.get(identity)
        if worker is not None:
            worker.state = WorkerState.DRAINING
        return worker

    def lose(self, identity: bytes, why: str = "") -> Worker | None:
        """Remove a worker and return it, or None.  It is listed as lost unless it has drained."""
        worker = self._workers.pop(identity, None)
        if worker is None:
            return None
        self._note_limits()
        seat = _seat(worker.role, worker.rank)
        del self._ranks[seat]
        if worker.state is not WorkerState.DRAINING or worker.attempts:
            self._lost[seat] = worker
            if len(self._lost) > MAX_LOST:
                self._lost.popitem(last=False)
        worker.state, worker.load = WorkerState.LOST, None
        worker.lost_why = why
        worker.running = worker.waiting = worker.num_others = 0
        return worker

    def update_costs(self) -> None:
        """Update the costs of all workers.  Call it about once per heartbeat.

        A cost that a worker has not measured is the lowest of its role, so that a new worker is
        tried.  The costs of an idle worker approach the lowest: a measurement in a bad moment would
        otherwise keep it idle for good.
        """
        workers = list(self._workers.values())
        is_idle = [not worker.measure() for worker in workers]
        for name in COSTS:
            lowest = {
                role: min(w.measured[name] for w in of_role)
                for role in Role
                if (of_role := [w for w in workers if w.role is role and name in w.measured])
            }
            overall = min(lowest.values(), default=0.0)
            for worker, idle in zip(workers, is_idle, strict=True):
                best = lowest.get(worker.role, overall)
                if idle and name in worker.measured:
                    worker.measured[name] += LATEST * (best - worker.measured[name])
                setattr(worker, name, worker.measured.get(name, best))

    def overdue(self, now: float) -> list[Worker]:
        """Return the workers that were silent for too long, and mark less late ones as suspect.

        Call it several times per heartbeat interval.  A longer gap between two calls means that
        this process was paused and has not read its messages yet, so the gap is not counted.
        """
        pause_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if pause_s > self.heartbeat_s:
            for worker in self._workers.values():
                worker.last_heard = min(now, worker.last_heard + pause_s)
        late = now - SUSPECT_BEATS * self.heartbeat_s
        for worker in self._workers.values():
            if worker.is_ready and worker.last_heard < late:
                worker.state = WorkerState.SUSPECT
        limit = now - MISSED_BEATS * self.heartbeat_s
        return [worker for worker in self._workers.values() if worker.last_heard < limit]

    def _fence(self, incumbent: Worker, now: float) -> None:
        """Raise WireError FENCED if the worker that has the rank is alive."""
        if now - incumbent.last_heard <= SUSPECT_BEATS * self.heartbeat_s:
            raise WireError(
                ErrorCode.FENCED,
                f"{incumbent.name} is here already and alive (epoch {incumbent.epoch}): give this "
                "worker another --rank, or stop that one first",
            )

    def _note_limits(self) -> None:
        """Recompute the limits of the fleet, which every request reads."""
        self._kv_bytes = self._best(lambda detail: detail.max_kv_transfer_bytes)
        self.block_sizes = {worker.detail.block_size for worker in self._workers.values()}
        self.max_model_len = min(self._best(lambda detail: detail.max_model_len), default=None)
        self.last_max_model_len = self.max_model_len or self.last_max_model_len

    def _best(self, limit: Callable[[HelloDetail], int]) -> list[int]:
        """Return, for each role that has workers, the highest value of a limit."""
        found = [
            [limit(worker.detail) for worker in self.live if worker.can(role)]
            for role in (Role.PREFILL, Role.DECODE)
        ]
        return [max(limits) for limits in found if limits]

    def _layout_beside(self, role: Role, rank: int) -> KVLayout | None:
        """Return the KV layout of all other workers, or None: a sole worker may change its own."""
        return next(
            (
                worker.detail.layout
                for worker in self._workers.values()
                if _seat(worker.role, worker.rank) != _seat(role, rank)
            ),
            None,
        )

    def _mismatch(self, hello: Hello, detail: HelloDetail) -> str:
        """Return why a worker does not fit this cluster, or ""."""
        if hello.role not in (Role.PREFILL, Role.DECODE, Role.ANY):
            return f"role {hello.role}: only workers of prefill, decode or any join the bus"
        if hello.rank >= NO_RANK:
            return f"rank {hello.rank} is reserved; use one below {NO_RANK}"
        if detail.fingerprint != self.model_fingerprint:
            return (
                f"model fingerprint {detail.fingerprint or '(none)'}, the router has "
                f"{self.model_fingerprint}; give both the same --model, with the same files"
            )
        layout = self._layout_beside(Role(hello.role), hello.rank)
        if layout is not None and detail.layout != layout:
            return (
                f"KV layout {detail.layout}, the cluster has {layout}; "
                "start every worker with the same --model, --executor, --dtype and --kv-dtype"
            )
        if hello.role != Role.PREFILL and not _is_reachable(detail.kv_endpoint):
            return (
                f"a {Role(hello.role).name.lower()} worker with the KV endpoint "
                f"{detail.kv_endpoint or '(none)'}, where nobody can connect to; set --kv-advertise"
            )
        if detail.num_blocks < 1:
            return "no KV blocks; set --num-blocks or --kv-cache-bytes"
        return ""


def _seat(role: Role, rank: int) -> tuple[Role, int]:
    """Return the role and rank that only one worker may have: `decode` and `any` share ranks."""
    return Role.PREFILL if role is Role.PREFILL else Role.DECODE, rank


def _is_reachable(endpoint: str) -> bool:
    """Whether other workers can connect to it: no wildcard or multicast address."""
    if not endpoint.startswith("tcp://"):
        return bool(endpoint)
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return True  # a host name
    is_group = address.is_multicast or address == ip_address("255.255.255.255")
    return not (address.is_unspecified or is_group)
