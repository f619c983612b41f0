"""Who is turned away, and in which words."""

import pytest

from wire.errors import ErrorCode
from wire.options import Options
from worker.engine.admission import bind, find_problem, resume, tell
from worker.engine.blocks import BlockPool
from worker.engine.outputs import Failed, Reserved, Started
from worker.engine.plan import Plan
from worker.engine.sequence import Sequence, Status
from worker.executor.hash import create

INFO = create(max_model_len=64).info
POOL = BlockPool(8, 4)


@pytest.mark.parametrize(
    ("num_tokens", "extra", "code"),
    [
        (32, 0, None),
        (33, 0, ErrorCode.OUT_OF_BLOCKS),
        (32, 1, ErrorCode.OUT_OF_BLOCKS),
        (64, 0, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (0, 0, ErrorCode.INVALID_REQUEST),
    ],
)
def test_the_first_reason_is_named(num_tokens: int, extra: int, code: ErrorCode | None) -> None:
    problem = find_problem(Sequence(1, [5] * num_tokens), INFO, POOL, extra)
    assert (problem and problem[0]) == code


def test_a_continuation_is_checked() -> None:
    sequence = Sequence(1, [1, 2], status=Status.RESERVED)
    problem = resume(sequence, [1, 3, 4], Options(), 3)
    assert problem is not None and problem[0] is ErrorCode.INVALID_REQUEST
    assert resume(sequence, [1, 2, 4], Options(), 3) is None and sequence.num_tokens == 3


def test_stops_are_the_model_s_and_the_request_s() -> None:
    sequence = Sequence(1, [5], Options(stop_token_ids=(7,)))
    bind(sequence, INFO)
    assert sequence.stop_ids == {2, 7}
    sequence = Sequence(1, [5], Options(stop_token_ids=(7,), ignore_eos=True))
    bind(sequence, INFO)
    assert sequence.stop_ids == {7}


def test_the_context_ends_what_its_own_limit_does_not() -> None:
    short, long = Sequence(1, [5] * 4, max_new_tokens=3), Sequence(2, [5] * 4, max_new_tokens=300)
    for sequence in (short, long):
        bind(sequence, INFO)
    assert (short.max_len, long.max_len) == (7, INFO.max_model_len)


def test_a_plan_is_told() -> None:
    started, reserved = Sequence(1, [5] * 4), Sequence(2, [5] * 4)
    started.block_table.extend([3])
    failed, overdue = Sequence(3, [5] * 40), Sequence(4, [5], Options(deadline_ms=20))
    plan = Plan(started=[started], reserved=[reserved], failed=[failed], overdue=[overdue])
    outputs = tell(plan, POOL)
    assert outputs[:2] == [Started(1, (3,), 0), Reserved(2, (), 0)]
    codes = [(o.request_id, o.code) for o in outputs if isinstance(o, Failed)]
    assert codes == [(3, ErrorCode.OUT_OF_BLOCKS), (4, ErrorCode.DEADLINE_EXCEEDED)]
