"""Counters, gauges and slots of an engine, for metrics (seeds 002 and 004)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final

from msgspec.structs import replace

from wire.payloads import Load
from worker.engine.blocks import BlockPool
from worker.engine.scheduler import Plan, Scheduler
from worker.engine.sequence import Sequence
from worker.engine.step_costs import Speed
from worker.engine.tiering import Tiering

# Bounds of the step histogram, from steps of the hash executor to those of a slow machine.
STEP_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)


@dataclass(slots=True)
class Counters:
    """Totals since the engine was created; only the engine writes them.

    Attributes:
        prefill_tokens: Prompt tokens computed, including recomputed tokens.
        decode_tokens: Sampled tokens, including accepted drafts.
        cached_tokens: Tokens found in the prefix cache instead of computed or received.
        finished: Completed sequences; with a transfer the first token completes the sequence.
        failed: Sequences that ended with an error, including the `overdue` ones.
        overdue: Sequences that exceeded their deadline.
        drafted_tokens: Draft tokens verified, of which `accepted_tokens` were accepted.
        step_counts: Steps by duration: one count per bound of `STEP_S`, one for longer steps.
        forward_s: Time in the executor; `draft_s`: in the drafter; `overhead_s`: all other time.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    started: int = 0
    finished: int = 0
    failed: int = 0
    overdue: int = 0
    cancelled: int = 0
    preemptions: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_S) + 1))
    draft_s: float = 0.0
    forward_s: float = 0.0
    overhead_s: float = 0.0

    def measure(self, draft_s: float, forward_s: float, step_s: float) -> None:
        """Add the times of a step; `step_s` includes `forward_s` but not `draft_s`."""
        self.step_counts[bisect_left(STEP_S, draft_s + step_s)] += 1
        self.draft_s += draft_s
        self.forward_s += forward_s
        self.overhead_s += step_s - forward_s

    def count(self, plan: Plan) -> None:
        self.steps += bool(plan.chunks)
        self.prefill_tokens += plan.num_prefill_tokens
        self.preemptions += len(plan.preempted)
        self.swaps_out += len(plan.swapped_out)
        self.swaps_in += len(plan.swapped_in)
        self.started += len(plan.started)
        self.cached_tokens += sum(sequence.num_cached_tokens for sequence in plan.started)
        self.cached_tokens += sum(sequence.num_cached_tokens for sequence in plan.reserved)
        self.overdue += len(plan.overdue)
        self.failed += len(plan.failed) + len(plan.overdue)


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of an engine's counters, queues and memory."""

    counters: Counters
    num_waiting: int
    num_reserving: int
    num_running: int
    num_swapped: int
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int
    window_blocks_total: int
    window_blocks_free: int
    window_blocks_used: int
    window_blocks_cached: int
    swap_bytes: int

    @classmethod
    def of(cls, scheduler: Scheduler, counters: Counters) -> Stats:
        pool, windows = scheduler.pool, scheduler.pool.windows
        return cls(
            counters=Counters(**asdict(counters)),
            num_waiting=len(scheduler.waiting),
            num_reserving=len(scheduler.reserving),
            num_running=len(scheduler.running),
            num_swapped=len(scheduler.swap),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            window_blocks_total=windows.blocks.num_blocks if windows else 0,
            window_blocks_free=windows.num_free if windows else 0,
            window_blocks_used=windows.num_used if windows else 0,
            window_blocks_cached=windows.num_cached if windows else 0,
            swap_bytes=scheduler.swap.num_bytes,
        )


class SlotState(StrEnum):
    PROCESSING = "processing"  # the prompt is being prefilled
    GENERATING = "generating"


@dataclass(frozen=True, slots=True)
class Slot:
    """A snapshot of a running sequence."""

    number: int
    request_id: int
    state: SlotState
    num_tokens: int
    num_computed_tokens: int
    num_new_tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Slots:
    """A thread-safe snapshot of the slots: the `active` ones by slot number, out of `total`."""

    active: tuple[Slot, ...]
    total: int

    @classmethod
    def of(cls, running: Iterable[Sequence], total: int, now: float) -> Slots:
        numbered = [(sequence.slot, sequence) for sequence in tuple(running)]
        slots = [
            Slot(
                number=number,
                request_id=it.request_id,
                state=SlotState.GENERATING if it.is_decoding else SlotState.PROCESSING,
                num_tokens=it.num_tokens,
                num_computed_tokens=it.num_computed_tokens,
                num_new_tokens=it.num_new_tokens,
                tokens_per_second=it.tokens_per_second(now),
            )
            for number, it in numbered
            if number is not None
        ]
        return cls(tuple(sorted(slots, key=lambda slot: slot.number)), total)

    @property
    def utilization(self) -> float:
        """The fraction of slots in use; at most 1, although reservations may exceed the total."""
        return min(1.0, len(self.active) / self.total)

    @property
    def tokens_per_second(self) -> float:
        return sum(slot.tokens_per_second for slot in self.active)


def load_of(
    pool: BlockPool, counters: Counters, speed: Speed, tiering: Tiering | None = None
) -> Load:
    """Return the figures of a heartbeat, with prefix hashes since the last call; thread-safe."""
    stored, evicted = pool.journal.read()

    def lost_by(tier: str) -> tuple[int, ...]:
        return tuple(prefix_hash for prefix_hash, last in evicted.items() if last == tier)

    free, cached = pool.num_free, pool.num_cached
    known = {} if tiering is None else tiering.figures().tiers
    tiers = {name: replace(tier, evicted=lost_by(name)) for name, tier in known.items()}
    return Load(
        total=pool.num_blocks,
        used=max(0, pool.num_blocks - free - cached),
        cached=cached,
        free=free,
        preemptions=counters.preemptions,
        **speed._asdict(),
        stored=stored,
        evicted=lost_by("kv_cache"),
        host=tiers.get("host"),
        disk=tiers.get("disk"),
    )
