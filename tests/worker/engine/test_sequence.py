"""A sequence knows its tokens, its progress and its end, what it shares, and why it is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.engine.windowed import windows_over
from wire.errors import ErrorCode, LocalProtocolError
from wire.options import Options
from worker.engine.blocks import BlockPool
from worker.engine.sequence import MAX_DRAFTS, TRANSITIONS, Sequence, Status
from worker.executor.contract import ModelInfo
from worker.executor.hash import LAYOUT, create

SMALL = ModelInfo("small", "", 100, 8, frozenset(), LAYOUT)
INFO = create(max_model_len=64).info
POOL = BlockPool(8, 4)


@pytest.mark.parametrize("before", Status)
@pytest.mark.parametrize("after", Status)
def test_a_sequence_moves_along_the_table_only(before: Status, after: Status) -> None:
    sequence = Sequence(1, [1, 2], status=before)
    if after in TRANSITIONS[before]:
        sequence.move_to(after)
        assert sequence.status is after
    else:
        with pytest.raises(LocalProtocolError, match=f"no way from {before} to {after}"):
            sequence.move_to(after)


def test_a_prompt_as_long_as_the_context_has_room_for_one_token_which_is_not_read() -> None:
    assert Sequence(1, [99] * 8, max_new_tokens=1).problem(SMALL, POOL) is None
    for num_tokens, max_new_tokens in ((8, 2), (9, 1)):
        problem = Sequence(1, [99] * num_tokens, None, max_new_tokens).problem(SMALL, POOL)
        assert problem is not None and problem[0] is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def finish(options: Options, output: list[int], max_new_tokens: int = 100) -> str | None:
    sequence = Sequence(1, [1, 1], options, max_new_tokens)
    sequence.stop_ids = frozenset({2})
    sequence.max_len = min(sequence.max_len, 10)
    sequence.token_ids += output
    return sequence.finish_reason()


def test_a_stop_token_ends_it_from_min_tokens_on() -> None:
    assert finish(Options(), [2]) == "stop"
    assert finish(Options(min_tokens=1), [2]) is None
    assert finish(Options(min_tokens=1), [5, 2]) == "stop"
    assert finish(Options(min_tokens=2), [5, 2]) is None


def test_a_limit_ends_it_and_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert finish(Options(), [5, 5, 5], 4) is None
    assert finish(Options(), [5, 5, 5], 3) == "length"
    assert finish(Options(), [5, 5, 2], 3) == "stop"
    assert finish(Options(), [5] * 8) == "length"


def test_as_many_drafts_as_were_right_before() -> None:
    sequence = Sequence(1, [1, 2], max_new_tokens=1000)

    def window_after(num_drafts: int, num_accepted: int) -> int:
        sequence.adapt(num_drafts, num_accepted)
        return sequence.max_drafts()

    assert sequence.max_drafts() == MAX_DRAFTS
    assert window_after(8, 3) == 4
    assert window_after(4, 0) == 1
    assert window_after(1, 1) == 2
    assert [window_after(2, 2) for _ in range(7)] == [4, 8, 16, 32, 64, 64, 64]


def test_tokens_of_an_earlier_attempt_are_output() -> None:
    """A sequence that goes on after a failover has the limits and penalties of one that did not."""
    options = Options(max_tokens=6, min_tokens=4, generated_tokens=3, presence_penalty=1.0)
    again = Sequence(1, [1, 2, 7, 8, 9], options)
    assert (again.prompt_len, again.num_output_tokens, again.max_new_tokens) == (2, 3, 3)
    reserved = Sequence(2, [1, 2, 7, 8, 9], status=Status.RESERVING)
    reserved.resume([1, 2, 7, 8, 9, 4], options, None)
    assert (reserved.prompt_len, reserved.num_output_tokens, reserved.max_new_tokens) == (2, 4, 2)
    for sequence in (again, reserved):
        assert sequence.occurrences is not None
        counts = dict(zip(sequence.occurrences.token_ids, sequence.occurrences.counts, strict=True))
        assert (counts[1], counts[7], counts[9]) == (0, 1, 1)


def test_a_prompt_that_is_all_generated_is_none() -> None:
    problem = Sequence(1, [1, 2], Options(generated_tokens=2)).problem(SMALL, POOL)
    assert problem is not None and "generated_tokens is 2" in problem[1]


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
    problem = Sequence(1, [5] * num_tokens).problem(INFO, POOL, extra)
    assert (problem and problem[0]) == code


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def admitted(token_ids: list[int], pool: BlockPool) -> Sequence:
    sequence = Sequence(1, token_ids)
    sequence.block_table.extend(pool.allocate(pool.blocks_for(len(token_ids))))
    return sequence


@given(PROMPTS, PROMPTS, st.integers(1, 12), st.integers(1, 4))
def test_a_waiting_prompt_finds_the_blocks_that_a_step_filled(
    one: list[int], other: list[int], num_tokens: int, block_size: int
) -> None:
    pool = BlockPool(16, block_size)
    reading, waiting = admitted(one, pool), Sequence(2, other)
    num_tokens = min(num_tokens, len(one))
    before, coming = waiting.missing(pool), reading.filled(num_tokens, pool)
    assert bool(coming) == (num_tokens >= block_size)
    reading.num_computed_tokens = num_tokens
    reading.register(pool)
    if before and coming:
        assert (before == coming) == (one[:block_size] == other[:block_size])
    assert (waiting.missing(pool) != before) == (bool(before) and before == coming)


def test_blocks_that_lack_less_are_shared_instead_and_others_stay() -> None:
    pool = BlockPool(9, 2, windows=windows_over(9, 2, [2]))
    one, two, three = (admitted([1, 2, 3, 4, 5, 6], pool) for _ in range(3))
    for sequence in (one, two, three):
        sequence.look(0, 6, pool)
    for sequence, whole_from, shared in (
        (one, 5, (one, one, one)),  # they lack 2, 2 and 1 of their tokens
        (two, 3, (one, two, two)),  # 2, 1, 0
        (three, 1, (three, three, two)),  # 1, 0, 0
    ):
        sequence.num_computed_tokens, sequence.whole_from = 6, whole_from
        sequence.register(pool)
        keys = sequence.keys(3, 2)
        want = [it.block_table[index] for index, it in enumerate(shared)]
        assert pool.match_prefix(keys, next_token=9)[0] == want
