"""The scenario of a seed: the cluster, its settings, the requests, and the faults with times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any, Final

from tests.simulation.workload import MAX_TOKENS, NUM_PROMPTS, VARIANTS, Job
from wire.layout import KVLayout
from worker.executor.hash import LAYOUT, MIXED

# The workers are there by then; the last fault is over by `CALM_S`.
BEGIN_S: Final = 0.6
CALM_S: Final = 6.0


class FaultKind(StrEnum):
    KILL = "kill"  # a worker, which comes back with a new epoch
    STOP = "stop"  # a worker, as by SIGSTOP
    REPLACE = "replace"  # a worker stops, a newer epoch takes its rank, then it goes on
    DRAIN = "drain"  # a worker, which comes back
    KILL_ROUTER = "kill router"
    CUT = "cut"  # all connections of a process
    CUT_BETWEEN = "cut between"  # those of two processes
    ONE_WAY = "one way"  # nothing from one process reaches the other
    PARTITION = "partition"  # nothing in either direction
    SLOW = "slow"  # an engine
    STOP_ROUTER = "stop router"  # as by SIGSTOP, for longer than a silent worker is given


SHORT_COPIES_S: Final = ((0.0, 0.001), (0.001, 0.03))
# Every so many seeds nothing goes wrong, but prompts take leases to read.
SLOW_EVERY: Final = 16
SLOW_READING_S: Final = (0.2, 0.5)
# On as many others a router stands still, besides all else; workers give it up after 3 s.
STOP_ROUTER_S: Final = ((1.3, 2.4), (2.4, 4.0))
# Of a KV cache in one segment, or there would be time for nothing else.
LONG_COPIES_S: Final = (0.02, 0.15)
WHOLE: Final = 2 << 20
# Faults that everybody they concern hears of at once.
CLEAR: Final = (FaultKind.KILL, FaultKind.KILL_ROUTER, FaultKind.DRAIN)
ANY: Final = tuple(kind for kind in FaultKind if kind is not FaultKind.STOP_ROUTER)


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: FaultKind
    target: str
    other: str
    duration_s: float


@dataclass(frozen=True)
class Scenario:
    """`settings` go to every worker; ranges are (least, most) seconds.

    `is_late`: what is copied out of the memory of others is in its blocks at the end of the copy.
    `reading_s`: of the steps of prefill workers, if they are not like all others.  `deadline_s`: of
    requests that have no shorter one.
    """

    num_routers: int
    num_prefills: int
    num_decodes: int
    settings: dict[str, Any]
    step_s: tuple[float, float]
    copy_s: tuple[float, float]
    latency_s: tuple[float, float]
    queue_bytes: int
    twice: float
    swapped: float
    corrupt: float
    max_running: int
    max_waiting: int
    cancels: float
    layout: KVLayout
    is_late: bool = False
    reading_s: tuple[float, float] | None = None
    deadline_s: float = 7.0
    local_prefill: bool = False
    role: str = "decode"  # or "any", of all workers that are not prefill workers
    jobs: list[Job] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def workers(self) -> list[str]:
        prefills = [f"prefill-{rank}" for rank in range(self.num_prefills)]
        return prefills + [f"{self.role}-{rank}" for rank in range(self.num_decodes)]

    @property
    def routers(self) -> list[str]:
        return [f"router-{rank}" for rank in range(self.num_routers)]

    @property
    def is_in_touch(self) -> bool:
        """Whether everybody who is there hears everything soon: a cancel has its bound."""
        return all(f.kind in CLEAR for f in self.faults) and self.queue_bytes >= 1 << 20

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong that a client could notice."""
        return not self.faults and not self.corrupt and self.queue_bytes >= 1 << 20


def draw(random: Random, seed: int) -> Scenario:
    """Make the scenario of a seed."""
    choice = random.choice
    num_faults = choice((0, 1, 1, 2, 3, 5))
    scenario = Scenario(
        num_routers=choice((1, 1, 1, 2)),
        num_prefills=choice((1, 2, 2, 3)),
        num_decodes=choice((1, 2, 2, 3)),
        settings=_settings(random),
        step_s=choice(((0.0005, 0.002), (0.002, 0.02), (0.04, 0.1))),
        copy_s=choice(SHORT_COPIES_S),
        latency_s=choice(((0.0001, 0.0005), (0.0001, 0.02), (0.01, 0.08))),
        queue_bytes=choice((1 << 24, 1 << 24, 1 << 24, 30_000)),
        twice=choice((0.0, 0.0, 0.2)),
        swapped=choice((0.0, 0.0, 0.3)),
        corrupt=choice((0.0, 0.0, 0.0, 0.05)),
        max_running=choice((2, 8, 256)),
        max_waiting=choice((3, 64)),
        cancels=choice((0.1, 0.1, 0.6)),
        layout=choice((LAYOUT, LAYOUT, MIXED)),
        role="any" if seed % 4 == 3 else "decode",
    )
    if scenario.settings["segment_bytes"] == WHOLE and random.random() < 0.5:
        scenario = replace(scenario, copy_s=LONG_COPIES_S)
    if scenario.layout.has_state:
        scenario.settings["speculate"] = ""  # a state cannot go back
    # Requests come in bursts, and faults just then.
    bursts = [random.uniform(BEGIN_S, 0.6 * CALM_S) for _ in range(random.randint(1, 3))]
    num_jobs = random.randint(4, 20)
    kinds = choice((CLEAR, ANY))
    scenario.jobs.extend(_job(random, name, bursts, scenario) for name in range(num_jobs))
    scenario.faults.extend(_fault(random, kinds, bursts, scenario) for _ in range(num_faults))
    scenario.settings["kv_shared_memory"] = choice(("auto", "auto", "off"))
    scenario = replace(scenario, is_late=choice((True, False)), local_prefill=seed % 3 == 1)
    if seed % SLOW_EVERY == SLOW_EVERY - 2:
        return _slowly_read(scenario)
    if seed % SLOW_EVERY == SLOW_EVERY // 2 - 1:
        # Of draws of its own: those of the other seeds, and of this one, stay what they were.
        scenario.faults.append(_router_stop(Random(f"router stop {seed}"), bursts, scenario))
    return scenario


def _router_stop(random: Random, bursts: list[float], scenario: Scenario) -> Fault:
    return Fault(
        at_s=random.choice(bursts) + random.choice((0.05, 0.3)) * random.random(),
        kind=FaultKind.STOP_ROUTER,
        target=random.choice(scenario.routers),
        other="",
        duration_s=random.uniform(*random.choice(STOP_ROUTER_S)),
    )


def _slowly_read(scenario: Scenario) -> Scenario:
    """Return it with prompts that are read in chunks for several leases, and no faults."""
    settings = {**scenario.settings, "max_ubatch_tokens": 8}
    return replace(
        scenario,
        settings=settings,
        reading_s=SLOW_READING_S,
        deadline_s=120.0,
        queue_bytes=1 << 24,
        corrupt=0.0,
        faults=[],
    )


def _settings(random: Random) -> dict[str, Any]:
    """Settings that the command line would refuse as too small are what makes races likely."""
    choice = random.choice
    block_size = choice((4, 8, 16))
    segment_bytes = choice((128, 512, WHOLE))
    credit_bytes = max(segment_bytes, choice((512, 1024, 16 << 20)))
    return {
        "block_size": block_size,
        "num_blocks": choice((26, 40, 200)) * 4 // block_size + 1,
        "max_ubatch_tokens": choice((8, 24, 512)),
        "max_sbatch_sequences": choice((2, 256)),
        "prefix_cache": choice((True, True, False)),
        "swap_bytes": choice((0, 0, 16_384)),
        "speculate": choice(("", "", "ngram:3")),
        "segment_bytes": segment_bytes,
        "credit_bytes": credit_bytes,
        "max_kv_inflight_bytes": choice((credit_bytes, 256 << 20)),
        "kv_unasked_bytes": choice((0, credit_bytes, credit_bytes)),
        "drain_s": choice((0.5, 4.0)),
    }


def _job(random: Random, name: int, bursts: list[float], scenario: Scenario) -> Job:
    def sometimes(chance: float, least: float, most: float) -> float | None:
        value = random.uniform(least, most)
        return value if random.random() < chance else None

    return Job(
        name=name,
        at_s=random.choice(bursts) + random.choice((0.0, 0.1, 0.5)) * random.random(),
        router=random.randrange(scenario.num_routers),
        prompt=random.randrange(NUM_PROMPTS),
        variant=random.randrange(len(VARIANTS)),
        max_tokens=random.choice((1, 2, random.randint(3, MAX_TOKENS), MAX_TOKENS)),
        layout=scenario.layout,
        priority=random.choice((0, 0, 0, 5, -5)),
        deadline_s=sometimes(0.15, 0.01, 2.0),
        cancel_after_s=sometimes(scenario.cancels, 0.0, random.choice((0.1, 1.0))),
        decode_after_s=sometimes(0.1, 0.0, 1.0),
    )


def _fault(
    random: Random, kinds: tuple[FaultKind, ...], bursts: list[float], scenario: Scenario
) -> Fault:
    kind = random.choice(kinds)
    others = scenario.workers + scenario.routers
    target = random.choice(scenario.workers)
    if kind is FaultKind.KILL_ROUTER:
        target = random.choice(scenario.routers)
    elif kind in (FaultKind.CUT, FaultKind.ONE_WAY):
        target = random.choice(others)
    return Fault(
        at_s=random.choice(bursts) + random.choice((0.05, 0.3, 1.0)) * random.random(),
        kind=kind,
        target=target,
        other=random.choice([name for name in others if name != target]),
        duration_s=random.choice((random.uniform(0.0, 0.3), random.uniform(0.1, 2.4))),
    )
