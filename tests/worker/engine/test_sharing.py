"""What a sequence adds to the prefix cache is what another one lacks."""

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.blocks import BlockPool
from worker.engine.sequence import Sequence
from worker.engine.sharing import filled, missing, register

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def admitted(token_ids: list[int], pool: BlockPool) -> Sequence:
    sequence = Sequence(1, token_ids)
    sequence.block_table.extend(pool.allocate(pool.blocks_for(len(token_ids))))
    return sequence


@given(PROMPTS, PROMPTS, st.integers(1, 12), st.integers(1, 4))
def test_who_lacks_what_is_filled_finds_more_afterwards(
    one: list[int], other: list[int], num_tokens: int, block_size: int
) -> None:
    pool = BlockPool(16, block_size)
    reading, waiting = admitted(one, pool), Sequence(2, other)
    num_tokens = min(num_tokens, len(one))
    before, coming = missing(waiting, pool), filled(reading, num_tokens, pool)
    assert bool(coming) == (num_tokens >= block_size)
    reading.num_computed_tokens = num_tokens
    register(reading, pool)
    if before and coming:
        assert (before == coming) == (one[:block_size] == other[:block_size])
    assert (missing(waiting, pool) != before) == (bool(before) and before == coming)


def test_what_lies_behind_the_registered_blocks_is_filled_next() -> None:
    pool = BlockPool(16, 2)
    reading = admitted([1, 2, 3, 4, 5], pool)
    reading.num_computed_tokens = 3
    register(reading, pool)
    assert reading.num_registered_blocks == 1 and filled(reading, 1, pool)
    assert filled(reading, 1, pool) == missing(Sequence(2, [1, 2, 3, 4, 9]), pool)
    assert missing(Sequence(2, [1, 2, 9]), pool) == [], "the last token is computed anyway"


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    pool = BlockPool(16, 2, enable_prefix_cache=False)
    assert filled(admitted([1, 2, 3], pool), 3, pool) == []
