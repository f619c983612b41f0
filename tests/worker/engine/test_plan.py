"""A plan adds up what its step computes and says whether it does anything."""

import pytest

from worker.engine.batch import Chunk
from worker.engine.plan import Plan
from worker.engine.sequence import Sequence
from worker.engine.swap import Swap
from worker.executor.batch import BatchType

SEQUENCE = Sequence(1, range(9))


def test_drafts_count_as_tokens() -> None:
    plan = Plan(decode=[Chunk(SEQUENCE, 1, (5, 6))], prefill=[Chunk(SEQUENCE, 4)])
    assert plan.num_tokens == 7 and plan.chunks == plan.decode + plan.prefill


@pytest.mark.parametrize(
    ("num_decode", "num_prefill", "max_ubatch_tokens", "is_mostly"),
    [
        (0, 32, 64, True),
        (32, 32, 64, True),
        (0, 31, 64, False),  # small
        (300, 256, 1024, False),  # most of it generates
        (0, 256, 1024, True),  # large enough, though the budget is larger
        (0, 1, 1, True),
    ],
)
def test_only_large_steps_are_mostly_prefill(
    num_decode: int, num_prefill: int, max_ubatch_tokens: int, is_mostly: bool
) -> None:
    long = Sequence(2, range(num_prefill))
    plan = Plan([Chunk(SEQUENCE, 1)] * num_decode, [Chunk(long, num_prefill)])
    assert plan.num_prefill_tokens == num_prefill
    assert plan.is_mostly_prefill(max_ubatch_tokens) is is_mostly


def test_its_kind_is_what_it_holds() -> None:
    decode, prefill = [Chunk(SEQUENCE, 1)], [Chunk(SEQUENCE, 4)]
    assert Plan(decode=decode).kind is BatchType.DECODE
    assert Plan(prefill=prefill).kind is BatchType.PREFILL
    assert Plan(decode=decode, prefill=prefill).kind is BatchType.MIXED


@pytest.mark.parametrize(
    "plan",
    [
        Plan(decode=[Chunk(SEQUENCE, 1)]),
        Plan(prefill=[Chunk(SEQUENCE, 1)]),
        Plan(preempted=[SEQUENCE]),
        Plan(swapped_in=[Swap(SEQUENCE, (), 0, 4)]),
        Plan(started=[SEQUENCE]),
        Plan(reserved=[SEQUENCE]),
        Plan(failed=[SEQUENCE]),
        Plan(overdue=[SEQUENCE]),
    ],
)
def test_anything_is_progress(plan: Plan) -> None:
    assert plan.is_progress and not Plan().is_progress
