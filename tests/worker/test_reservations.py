"""A text whose KV is on its way already is waited for, not sent and stored twice."""

import pytest

from worker.blocks import BlockPool
from worker.reservations import Reservations
from worker.sequence import Sequence, Status

PROMPT = list(range(10))


def reservation(request_id: int, token_ids: list[int]) -> Sequence:
    return Sequence(request_id, token_ids, status=Status.RESERVING)


def arriving(reservations: Reservations, sequence: Sequence, pool: BlockPool) -> Sequence:
    reservations.add(sequence)
    reservations.grant(sequence)
    sequence.block_table.extend(pool.allocate(pool.blocks_for(sequence.num_tokens)))
    return sequence


def pair(token_ids: list[int], **cache: bool) -> tuple[Reservations, Sequence, Sequence]:
    """KV of `PROMPT` arrives; a reservation of `token_ids` waits."""
    pool = BlockPool(16, 4, **cache)
    reservations = Reservations(pool)
    first = arriving(reservations, reservation(1, PROMPT), pool)
    reservations.add(second := reservation(2, token_ids))
    return reservations, first, second


@pytest.mark.parametrize("token_ids", [PROMPT, [*PROMPT, 3, 4]])
def test_who_begins_with_what_arrives_waits_until_it_is_here(token_ids: list[int]) -> None:
    reservations, first, second = pair(token_ids)
    assert reservations.head() is None and len(reservations) == 1
    reservations.add(third := reservation(3, [9, *PROMPT]))
    assert reservations.head() is third, "others pass"
    reservations.complete(first)
    assert reservations.head() is second
    assert reservations._pool.match_prefix(second.keys(2, 4))[0] == first.block_table.tolist()[:2]


@pytest.mark.parametrize("token_ids", [PROMPT[:9], [*PROMPT[:9], 3], PROMPT[:4]])
def test_who_needs_less_than_what_arrives_does_not_wait_for_all(token_ids: list[int]) -> None:
    reservations, _, second = pair(token_ids)
    assert reservations.head() is second


def test_without_a_prefix_cache_there_is_nothing_to_wait_for() -> None:
    reservations, _, second = pair(PROMPT, enable_prefix_cache=False)
    assert reservations.head() is second


def test_when_the_first_ends_early_the_next_takes_its_place() -> None:
    reservations, first, second = pair(PROMPT)
    reservations.remove(first)
    assert reservations.head() is second
    reservations.remove(second)
    assert reservations.head() is None and len(reservations) == 0


def test_what_is_complete_counts_once() -> None:
    reservations, first, _ = pair(PROMPT)
    reservations.complete(first)
    first.num_computed_tokens = 3
    reservations.complete(first)
    assert first.num_computed_tokens == 3, "whoever goes on with it is not disturbed"
    assert reservations._pool.num_used == 3
