"""Thousands of random workloads: nothing leaks, nothing starves, every text is the oracle's.

Acceptance 1 of the engine: arrivals, lengths, priorities, deadlines, cancels, transfers,
reservations, tiny pools, swap and speculation on and off.  `BATON_WORKLOADS` asks for more.
"""

import os
from typing import Any

import pytest

from tests.worker.workload import Fortune, Workload

NUM_WORKLOADS = int(os.environ.get("BATON_WORKLOADS", "320"))
GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_request_ends_once_with_its_text(group: int) -> None:
    for seed in range(group, NUM_WORKLOADS, GROUPS):
        try:
            Workload(seed).run()
        except BaseException as error:
            error.add_note(f"workload {seed}")
            raise


def totals(num_workloads: int, **settings: Any) -> dict[str, float]:
    """Run workloads with these settings; return what their engines counted in all."""
    sums: dict[str, float] = {}
    for seed in range(num_workloads):
        workload = Workload(10_000 + seed, **settings)
        workload.engine.swap.costs.copy_bytes_per_s = 1e12
        workload.run()
        for name, figure in workload.engine.stats().as_dict().items():
            sums[name] = sums.get(name, 0) + figure
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
