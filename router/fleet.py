"""The workers this router knows, by ZeroMQ identity: who may join, who is alive, how loaded.

A worker joins with HELLO, is placed on from its first HEARTBEAT (which says how many blocks are
free), is suspect while its beats are late or its steps stand still, drains when it asks to, and is
lost when its beats stop or its socket closes.  The newest epoch of a (role, rank) wins.  Pure: time
comes in as an argument, nothing is sent from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from router.worker import Worker, WorkerState
from wire.errors import ErrorCode, WireError
from wire.frames import NO_RANK, VERSION, Heartbeat, Hello, Role
from wire.payloads import HelloDetail, KVLayout, Load, PeerDetail

# A peer is dead after this many silent heartbeat intervals (FIELD_NOTES A2).
MISSED_BEATS: Final = 3
# One that was silent for this long is not placed on until it is heard again.
SUSPECT_BEATS: Final = 2
# A worker that died comes back this soon if something supervises it: requests wait for it.
REJOIN_S: Final = 10.0
# Lost workers stay listed until their rank comes back; ranks are few, strangers are not trusted.
MAX_LOST: Final = 64
MAX_WORKERS: Final = 4096


class Joined(NamedTuple):
    """A HELLO that was accepted; `replaced` is the older epoch, or the same worker come again."""

    worker: Worker
    replaced: Worker | None


class Fleet:
    """The table of workers.

    `own_max_kv_transfer_bytes` is the router's own setting; an engine that is longer than `stall_s`
    in one step stands still.
    """

    def __init__(
        self,
        *,
        model_fingerprint: str,
        max_kv_transfer_bytes: int,
        heartbeat_s: float,
        stall_s: float = 60.0,
    ) -> None:
        self.model_fingerprint = model_fingerprint
        self.own_max_kv_transfer_bytes = max_kv_transfer_bytes
        self.heartbeat_s = heartbeat_s
        self.stall_s = stall_s
        self._workers: dict[bytes, Worker] = {}
        self._last_max_model_len: int | None = None
        self._ranks: dict[tuple[Role, int], Worker] = {}
        self._lost: OrderedDict[tuple[Role, int], Worker] = OrderedDict()

    def __iter__(self) -> Iterator[Worker]:
        """Every worker that is here, and the lost ones whose rank did not come back."""
        yield from self._workers.values()
        yield from self._lost.values()

    def get(self, identity: bytes) -> Worker | None:
        """Return the worker of this identity unless it is lost."""
        return self._workers.get(identity)

    def live(self, role: Role) -> list[Worker]:
        """Workers of a role that are here, in whatever state."""
        return [worker for worker in self._workers.values() if worker.role is role]

    def expected(self, role: Role, now: float) -> list[Worker]:
        """Workers of a role that are ready, or will be soon if all goes well."""
        lost = (worker for worker in self._lost.values() if now - worker.lost_at <= REJOIN_S)
        return [
            worker
            for worker in (*self._workers.values(), *lost)
            if worker.role is role and worker.state is not WorkerState.DRAINING
        ]

    def ready(self, role: Role) -> list[Worker]:
        """Workers of a role that requests may be placed on."""
        return [worker for worker in self.live(role) if worker.is_ready]

    @property
    def last_max_model_len(self) -> int | None:
        """`max_model_len`, or what it was when the last worker left; None: none was ever here."""
        return self.max_model_len or self._last_max_model_len

    @property
    def layout(self) -> KVLayout | None:
        """The KV layout all workers here share; None while there is no worker."""
        return next((worker.detail.layout for worker in self._workers.values()), None)

    @property
    def max_kv_transfer_bytes(self) -> int:
        """The lowest limit of the router and the workers here: what each of them would refuse."""
        limits = [worker.detail.max_kv_transfer_bytes for worker in self._workers.values()]
        return min([self.own_max_kv_transfer_bytes, *limits])

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence in tokens that every worker here takes; None while there is none."""
        lengths = [worker.detail.max_model_len for worker in self._workers.values()]
        return min(lengths, default=None)

    def peers(self) -> list[PeerDetail]:
        """The decode workers, for PEERS; draining ones included: hand-overs may be under way."""
        return [
            PeerDetail(
                rank=worker.rank,
                epoch=worker.epoch,
                kv_endpoint=worker.detail.kv_endpoint,
                block_size=worker.detail.block_size,
            )
            for worker in self.live(Role.DECODE)
        ]

    def hello(self, identity: bytes, hello: Hello, detail: HelloDetail, now: float) -> Joined:
        """Admit a worker.

        Raises:
            WireError: MISMATCH or FENCED; the message says what to fix.
        """
        if reason := self._mismatch(hello, detail):
            raise WireError(ErrorCode.MISMATCH, reason)
        key = Role(hello.role), hello.rank
        replaced = self._ranks.get(key)
        if replaced is not None and (
            hello.epoch < replaced.epoch
            or (hello.epoch == replaced.epoch and identity != replaced.identity)
        ):
            raise WireError(
                ErrorCode.FENCED,
                f"{replaced.name} is already here with the newer epoch {replaced.epoch}; "
                "give this worker another --rank or stop the other one",
            )
        if replaced is None and identity in self._workers:
            raise WireError(ErrorCode.MISMATCH, "this connection is another worker's already")
        if replaced is None and len(self._workers) >= MAX_WORKERS:
            raise WireError(ErrorCode.OVERLOADED, f"there are {MAX_WORKERS} workers already")
        if replaced is not None:
            self.lose(replaced.identity, now)
        worker = Worker(identity, *key, hello.epoch, detail, now)
        self._workers[identity] = self._ranks[key] = worker
        self._lost.pop(key, None)
        return Joined(worker, replaced)

    def heartbeat(
        self, identity: bytes, beat: Heartbeat, load: Load | None, now: float
    ) -> Worker | None:
        """Note that a worker is alive and how loaded; None when it is unknown."""
        worker = self._workers.get(identity)
        if worker is None:
            return None
        worker.last_seen = now
        worker.step, worker.running, worker.waiting = beat.step, beat.running, beat.waiting
        if load is not None:
            worker.on_load(load)
            worker.is_stalled = load.step_ms >= self.stall_s * 1000
            if worker.state is not WorkerState.DRAINING:
                worker.state = WorkerState.SUSPECT if worker.is_stalled else WorkerState.READY
        return worker

    def drain(self, identity: bytes) -> Worker | None:
        """The worker wants no more placements; None when it is unknown."""
        worker = self._workers.get(identity)
        if worker is not None:
            worker.state = WorkerState.DRAINING
        return worker

    def lose(self, identity: bytes, now: float) -> Worker | None:
        """Take a worker out; None when it is unknown.  One that drained is not listed as lost."""
        self._last_max_model_len = self.last_max_model_len
        worker = self._workers.pop(identity, None)
        if worker is None:
            return None
        key = worker.role, worker.rank
        del self._ranks[key]
        if worker.state is not WorkerState.DRAINING or worker.attempts:
            self._lost[key] = worker
            if len(self._lost) > MAX_LOST:
                self._lost.popitem(last=False)
        worker.state, worker.load, worker.lost_at = WorkerState.LOST, None, now
        worker.running = worker.waiting = 0
        return worker

    def overdue(self, now: float) -> list[Worker]:
        """Workers whose heartbeats stopped; those whose are late become suspect."""
        late = now - SUSPECT_BEATS * self.heartbeat_s
        for worker in self._workers.values():
            if worker.is_ready and worker.last_seen < late:
                worker.state = WorkerState.SUSPECT
        limit = now - MISSED_BEATS * self.heartbeat_s
        return [worker for worker in self._workers.values() if worker.last_seen < limit]

    def _layout_beside(self, role: Role, rank: int) -> KVLayout | None:
        """The layout of the others: a rank that comes back may bring another one when alone."""
        return next(
            (
                worker.detail.layout
                for worker in self._workers.values()
                if (worker.role, worker.rank) != (role, rank)
            ),
            None,
        )

    def _mismatch(self, hello: Hello, detail: HelloDetail) -> str:
        if hello.version != VERSION:
            return (
                f"protocol version {hello.version}, the router speaks {VERSION}; "
                "install the same release of baton-serve on both"
            )
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
                f"KV layout {_sentence(detail.layout)}, the cluster has {_sentence(layout)}; "
                "start every worker with the same --dtype"
            )
        if hello.role == Role.DECODE and not detail.kv_endpoint:
            return "a decode worker without a KV endpoint; set --kv-advertise"
        if detail.num_blocks < 1:
            return "no KV blocks; set --num-blocks or --kv-cache-bytes"
        return ""


def _sentence(layout: KVLayout) -> str:
    return (
        f"{layout.num_layers} layers x {layout.num_kv_heads} heads x {layout.head_dim} "
        f"of {layout.dtype}"
    )
