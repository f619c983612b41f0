"""The workers this router knows: who may join, who is alive, how loaded each is.

A worker joins with HELLO.  It gets requests from its first HEARTBEAT on, which says how many blocks
are free.  It is suspect, and gets none, after a short silence or while its engine stands still; it
drains when it asks to, and is lost when it stays silent or its connection closes.  A worker
that is alive keeps its role and rank, whoever else asks for them.  A limit that a worker states is
that worker's only, never one of the whole fleet.

Pure: time comes in as an argument, nothing is sent from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from typing import Final, NamedTuple

from wire.errors import ErrorCode, RemoteProtocolError, WireError
from wire.frames import NO_RANK, VERSION, Heartbeat, Hello, Role
from wire.identity import Identity
from wire.layout import KVLayout
from wire.payloads import HelloDetail, Load, PeerDetail

# A worker is lost after this many heartbeat intervals of silence.
MISSED_BEATS: Final = 3
# After this many it gets no more requests until it is heard again.
SUSPECT_BEATS: Final = 2
# A worker that died is back within this time if something restarts it: requests wait for it.
REJOIN_S: Final = 10.0
# Lost workers are listed until their rank is taken; only the latest, for any rank may be claimed.
MAX_LOST: Final = 64
MAX_WORKERS: Final = 4096


class WorkerState(StrEnum):
    """Where a worker is in its life, as `/v1/cluster` shows it."""

    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process: what it said of itself, and what this router has placed on it.

    It is `is_stalled` while its engine stays in one step for too long, though heartbeats come.
    """

    identity: bytes
    role: Role
    rank: int
    epoch: int
    detail: HelloDetail
    # When its last HEARTBEAT came, and when anything did: a heartbeat may wait behind tokens.
    last_seen: float
    last_heard: float
    state: WorkerState = WorkerState.JOINING
    # Among equals, a worker with a lower one is chosen.
    turn: int = 0

    lost_at: float = 0.0
    is_stalled: bool = False

    # From its last HEARTBEAT.
    load: Load | None = None
    step: int = 0
    running: int = 0
    waiting: int = 0
    # Of them, those that other routers placed.
    num_others: int = 0

    # Placed by this router: the ids of the attempts that involve it; how many of them keep it busy;
    # the prompt tokens it still has to read.
    attempts: set[int] = field(default_factory=set)
    num_active: int = 0
    prompt_tokens: int = 0
    # Blocks set aside for attempts by id, and their sum, until a heartbeat counts them as used.
    promised: dict[int, int] = field(default_factory=dict)
    promised_blocks: int = 0
    # Blocks of attempts that were ended to make room, until a heartbeat counts them as free.
    returning_blocks: int = 0
    # Attempts that have taken their blocks since the last heartbeat.
    _settling: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.role.name.lower()}-{self.rank}"

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def available_blocks(self) -> int:
        """Blocks that a new request may have: free or cached, less those set aside for others."""
        if self.load is None:
            return 0
        return self.load.free + self.load.cached - self.promised_blocks

    def promise(self, request_id: int, num_blocks: int) -> None:
        """Set blocks aside for an attempt, until a heartbeat counts them as used."""
        self.promised[request_id] = num_blocks
        self.promised_blocks += num_blocks

    def settle(self, request_id: int) -> None:
        """The attempt has taken its blocks: the next heartbeat will count them."""
        if request_id in self.promised:
            self._settling.add(request_id)

    def unpromise(self, request_id: int) -> None:
        """Set nothing aside for this attempt any more; idempotent."""
        self.promised_blocks -= self.promised.pop(request_id, 0)
        self._settling.discard(request_id)

    def on_beat(self, beat: Heartbeat) -> None:
        """Take what a worker has to do, for whichever router."""
        self.step, self.running, self.waiting = beat.step, beat.running, beat.waiting
        self.num_others = max(0, beat.running + beat.waiting - len(self.attempts))

    def on_load(self, load: Load) -> None:
        """Take the blocks of a heartbeat, which counts those that attempts took before it."""
        self.load, self.returning_blocks = load, 0
        for request_id in tuple(self._settling):
            self.unpromise(request_id)


class Joined(NamedTuple):
    """A HELLO that was accepted.  `replaced` had the rank before: a worker that had fallen silent,
    or this one, which says HELLO again."""

    worker: Worker
    replaced: Worker | None


class Fleet:
    """The table of workers, by ZeroMQ identity.

    `own_max_kv_transfer_bytes` is the router's own limit; a worker whose engine is longer than
    `stall_s` in one step stands still.  It is number `process` of `num_processes` that choose among
    these workers: among equals, each begins with others.

    Attributes:
        max_model_len: The longest sequence in tokens that a worker of each role takes; None: none
            is here.
        last_max_model_len: The same, or what it was when the last worker left; None if none was
            ever here.
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
        self._workers: dict[bytes, Worker] = {}
        # The largest KV cache that a worker takes, of each role that is here.
        self._kv_bytes: list[int] = []
        self._looked_at: float | None = None  # when `overdue` was asked last
        self._ranks: dict[tuple[Role, int], Worker] = {}
        self._lost: OrderedDict[tuple[Role, int], Worker] = OrderedDict()

    def __iter__(self) -> Iterator[Worker]:
        """Yield every worker that is here, and the lost ones whose rank nobody has now."""
        yield from self._workers.values()
        yield from self._lost.values()

    def get(self, identity: bytes) -> Worker | None:
        """Return the worker of this identity unless it is lost."""
        return self._workers.get(identity)

    def live(self, role: Role) -> list[Worker]:
        """Return the workers of a role that are here, in whatever state."""
        return [worker for worker in self._workers.values() if worker.role is role]

    def expected(self, role: Role, now: float) -> list[Worker]:
        """Return the workers of a role that are ready, or will be soon if all goes well."""
        lost = (worker for worker in self._lost.values() if now - worker.lost_at <= REJOIN_S)
        return [
            worker
            for worker in (*self._workers.values(), *lost)
            if worker.role is role and worker.state is not WorkerState.DRAINING
        ]

    def ready(self, role: Role) -> list[Worker]:
        """Return the workers of a role that requests may be placed on."""
        ready = WorkerState.READY
        return [it for it in self._workers.values() if it.role is role and it.state is ready]

    @property
    def layout(self) -> KVLayout | None:
        """The KV layout, which all workers here share; None while there is no worker."""
        return next((worker.detail.layout for worker in self._workers.values()), None)

    @property
    def max_kv_transfer_bytes(self) -> int:
        """The largest KV cache that a worker of each role takes, within the router's own limit."""
        return min([self.own_max_kv_transfer_bytes, *self._kv_bytes])

    @property
    def fence_s(self) -> float:
        """How long a worker that vanished keeps its rank: until it has missed its heartbeats."""
        return MISSED_BEATS * self.heartbeat_s

    def peers(self) -> list[PeerDetail]:
        """Return the decode workers for PEERS; those that drain too, they may be taking KV in."""
        return [
            PeerDetail(
                rank=worker.rank,
                epoch=worker.epoch,
                kv_endpoint=worker.detail.kv_endpoint,
                block_size=worker.detail.block_size,
                kv_unasked_bytes=worker.detail.kv_unasked_bytes,
            )
            for worker in self.live(Role.DECODE)
        ]

    @property
    def arithmetics(self) -> list[str]:
        """The `arithmetic` of the workers here: one name if a text is the same on all."""
        return sorted({worker.detail.arithmetic for worker in self._workers.values()})

    def hello(self, identity: bytes, hello: Hello, detail: HelloDetail, now: float) -> Joined:
        """Admit a worker.

        Raises:
            WireError: MISMATCH, FENCED or OVERLOADED; the message says what to fix.
            RemoteProtocolError: It claims to be another worker than its ZeroMQ identity says; and
                its key was checked against that identity.
        """
        if reason := self._mismatch(hello, detail):
            raise WireError(ErrorCode.MISMATCH, reason)
        key = Role(hello.role), hello.rank
        if Identity.parse(identity) != Identity(*key, hello.epoch):
            raise RemoteProtocolError("HELLO names another worker than the ZeroMQ identity does")
        replaced = self._ranks.get(key)
        if replaced is not None and replaced.identity != identity:
            self._fence(replaced, now)
        if replaced is None and len(self._workers) >= MAX_WORKERS:
            raise WireError(ErrorCode.OVERLOADED, f"there are {MAX_WORKERS} workers already")
        if replaced is not None:
            self.lose(replaced.identity, now)
        turn = (hello.rank - self._process) % self._num_processes
        worker = Worker(identity, *key, hello.epoch, detail, now, now, turn=turn)
        self._workers[identity] = self._ranks[key] = worker
        self._lost.pop(key, None)
        self._note_limits()
        return Joined(worker, replaced)

    def heartbeat(self, identity: bytes, beat: Heartbeat, load: Load, now: float) -> Worker | None:
        """Note how loaded a worker is, and that it is alive; None if it is unknown.

        Raises:
            RemoteProtocolError: Its blocks do not add up to those it has.
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
        """Place nothing more on this worker; None if it is unknown."""
        worker = self._workers.get(identity)
        if worker is not None:
            worker.state = WorkerState.DRAINING
        return worker

    def lose(self, identity: bytes, now: float) -> Worker | None:
        """Take a worker out; None if it is unknown.  One that drained is not listed as lost."""
        worker = self._workers.pop(identity, None)
        if worker is None:
            return None
        self._note_limits()
        key = worker.role, worker.rank
        del self._ranks[key]
        if worker.state is not WorkerState.DRAINING or worker.attempts:
            self._lost[key] = worker
            if len(self._lost) > MAX_LOST:
                self._lost.popitem(last=False)
        worker.state, worker.load, worker.lost_at = WorkerState.LOST, None, now
        worker.running = worker.waiting = worker.num_others = 0
        return worker

    def overdue(self, now: float) -> list[Worker]:
        """Return the workers that have fallen silent; mark those that may have as suspect.

        Ask several times a heartbeat: a longer time in which nobody did is this process's own
        pause, and what was said in it is still to be read.
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
        """Refuse another worker the rank of one that was heard lately."""
        if now - incumbent.last_heard <= SUSPECT_BEATS * self.heartbeat_s:
            raise WireError(
                ErrorCode.FENCED,
                f"{incumbent.name} is here already and alive (epoch {incumbent.epoch}): give this "
                "worker another --rank, or stop that one first",
            )

    def _note_limits(self) -> None:
        """Work out once what the workers that are here take now: every request asks for it."""
        self._kv_bytes = self._best(lambda detail: detail.max_kv_transfer_bytes)
        self.max_model_len = min(self._best(lambda detail: detail.max_model_len), default=None)
        self.last_max_model_len = self.max_model_len or self.last_max_model_len

    def _best(self, limit: Callable[[HelloDetail], int]) -> list[int]:
        """Return for each role that is here the highest limit: over it, no worker could take it."""
        found = [
            [limit(worker.detail) for worker in self.live(role)]
            for role in (Role.PREFILL, Role.DECODE)
        ]
        return [max(limits) for limits in found if limits]

    def _layout_beside(self, role: Role, rank: int) -> KVLayout | None:
        """Return the KV layout of all workers but this one, which may come back with another layout
        if it is the only one."""
        return next(
            (
                worker.detail.layout
                for worker in self._workers.values()
                if (worker.role, worker.rank) != (role, rank)
            ),
            None,
        )

    def _mismatch(self, hello: Hello, detail: HelloDetail) -> str:
        if hello.role not in (Role.PREFILL, Role.DECODE):
            return f"role {hello.role}: only prefill and decode workers join the bus"
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
        if hello.role == Role.DECODE and not _is_reachable(detail.kv_endpoint):
            return (
                f"a decode worker with the KV endpoint {detail.kv_endpoint or '(none)'}, where "
                "nobody can connect to; set --kv-advertise"
            )
        if detail.num_blocks < 1:
            return "no KV blocks; set --num-blocks or --kv-cache-bytes"
        return ""


def check_version(hello: Hello) -> None:
    """Refuse a HELLO of another version, whose payload may be another too.

    Raises:
        WireError: MISMATCH; the message says what to fix.
    """
    if hello.version != VERSION:
        raise WireError(
            ErrorCode.MISMATCH,
            f"protocol version {hello.version}, the router speaks {VERSION}; "
            "install the same release of baton-serve on both",
        )


def _is_reachable(endpoint: str) -> bool:
    """Tell whether prefill workers can connect there: no wildcard, no multicast."""
    if not endpoint.startswith("tcp://"):
        return bool(endpoint)
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return True  # A name.
    is_group = address.is_multicast or address == ip_address("255.255.255.255")
    return not (address.is_unspecified or is_group)
