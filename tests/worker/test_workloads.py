"""Random workloads: nothing leaks, nothing starves, every text is the oracle's.

Acceptance 1 of the engine: arrivals, lengths, priorities, deadlines, cancels, transfers,
reservations, tiny pools, swap and speculation on and off.  `BATON_WORKLOADS` asks for more.
"""

import os
from dataclasses import asdict
from typing import Any

import pytest

from tests.worker.workload import LAYOUTS, Fortune, Workload

NUM_WORKLOADS = int(os.environ.get("BATON_WORKLOADS", "80"))
GROUPS = 4


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_request_ends_once_with_its_text(group: int) -> None:
    for seed in range(group, NUM_WORKLOADS, GROUPS):
        _run(seed, "all")


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "all"])
def test_layers_with_a_window_and_states_change_no_text(name: str) -> None:
    for seed in range(NUM_WORKLOADS // 2):
        _run(seed, name)


def _run(seed: int, name: str) -> None:
    try:
        Workload(seed, LAYOUTS[name]).run()
    except BaseException as error:
        error.add_note(f"workload {seed}, {name}")
        raise


def totals(num_workloads: int, name: str = "all", /, **settings: Any) -> dict[str, float]:
    """Run workloads with these settings; return what their engines counted in all."""
    sums: dict[str, float] = {"shared": 0}
    for seed in range(num_workloads):
        workload = Workload(10_000 + seed, LAYOUTS[name], **settings)
        workload.engine.swap.costs.copy_bytes_per_s = 1e12
        workload.run()
        sums["shared"] += workload.num_shared
        counters = asdict(workload.engine.stats().counters)
        del counters["step_counts"]
        for key, figure in counters.items():
            sums[key] = sums.get(key, 0) + figure
    return sums


def test_the_workloads_do_what_they_are_for() -> None:
    """Else the properties above would hold of nothing."""
    crowded = {"num_blocks": 12, "block_size": 4, "max_ubatch_tokens": 64}
    swapped = totals(30, swap_bytes=1 << 20, **crowded)
    assert swapped["swaps_out"] > 10 and swapped["swaps_in"] > 10
    assert totals(30, swap_bytes=0, **crowded)["preemptions"] > 10
    speculated = totals(20, speculate=Fortune(4), max_ubatch_tokens=64)
    assert speculated["accepted_tokens"] > 100
    assert speculated["drafted_tokens"] > speculated["accepted_tokens"], "and rejected ones"
    assert totals(20, speculate="ngram:4")["accepted_tokens"] > 10
    assert totals(20)["overdue"] > 3


def test_much_is_shared_whatever_the_layers_are() -> None:
    """Of reservations, tokens that need not be sent again."""
    roomy = {"num_blocks": 100, "block_size": 4, "prefix_cache": True}
    shared = {name: totals(24, name, **roomy)["shared"] for name in LAYOUTS}
    assert all(num_tokens > 0.5 * shared["all"] for num_tokens in shared.values())
