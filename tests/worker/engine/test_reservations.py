"""KV on its way is waited for, not sent twice; what no router asked for holds only a part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.options import Options
from worker.engine.blocks import BlockPool
from worker.engine.reservations import PART_OF_ALL, PEER_PART, Reservations, Unclaimed
from worker.engine.sequence import Sequence, Status

PROMPT = list(range(10))


def reservation(request_id: int, token_ids: list[int], peer: str = "prefill-0-1") -> Sequence:
    return Sequence(request_id, token_ids, offered_by=peer, status=Status.RESERVING)


def arriving(reservations: Reservations, sequence: Sequence, pool: BlockPool) -> Sequence:
    reservations.add(sequence)
    sequence.block_table.extend(pool.allocate(pool.blocks_for(sequence.num_tokens + 1)))
    reservations.grant(sequence)
    return sequence


def begin(reservations: Reservations, sequence: Sequence) -> None:
    """Its KV is here, and it goes on as a router asked."""
    reservations.claim(sequence)
    sequence.num_computed_tokens = sequence.num_tokens
    reservations.begin(sequence)


def pair(
    token_ids: list[int], *, enable_prefix_cache: bool = True
) -> tuple[Reservations, Sequence, Sequence]:
    """KV of `PROMPT` arrives; a reservation of `token_ids` waits."""
    pool = BlockPool(16, 4, enable_prefix_cache=enable_prefix_cache)
    reservations = Reservations(pool)
    first = arriving(reservations, reservation(1, PROMPT), pool)
    reservations.add(second := reservation(2, token_ids))
    return reservations, first, second


@pytest.mark.parametrize("token_ids", [PROMPT, [*PROMPT, 3, 4]])
def test_a_reservation_waits_for_an_arriving_prefix(token_ids: list[int]) -> None:
    reservations, first, second = pair(token_ids)
    assert reservations.head() is None and len(reservations) == 1
    reservations.add(third := reservation(3, [9, *PROMPT]))
    assert reservations.head() is third, "others pass"
    begin(reservations, first)
    assert reservations.head() is second
    assert reservations.pool.match_prefix(second.keys(2, 4))[0] == first.block_table.tolist()[:2]


@pytest.mark.parametrize("token_ids", [PROMPT[:9], [*PROMPT[:9], 3], PROMPT[:4]])
def test_a_reservation_does_not_wait_for_a_longer_prompt(token_ids: list[int]) -> None:
    reservations, _, second = pair(token_ids)
    assert reservations.head() is second


@pytest.mark.parametrize("salt", ["", "b"])
def test_a_reservation_does_not_wait_for_the_prefix_of_another_salt(salt: str) -> None:
    reservations = Reservations(BlockPool(16, 4))

    def salted(request_id: int, cache_salt: str) -> Sequence:
        options = Options(cache_salt=cache_salt)
        return Sequence(request_id, PROMPT, options, status=Status.RESERVING)

    first = arriving(reservations, salted(1, "a"), reservations.pool)
    reservations.add(same := salted(2, "a"))
    assert reservations.head() is None
    reservations.add(other := salted(3, salt))
    assert reservations.head() is other
    begin(reservations, first)
    assert reservations.head() is same


def held(reservations: Reservations, pool: BlockPool, peer: str, count: int) -> list[Sequence]:
    """KV of `count` texts arrives from a peer, 3 blocks each."""
    texts = ([hash(peer) % 1000, number, *PROMPT[1:]] for number in range(count))
    sequences = [reservation(number, text, peer) for number, text in enumerate(texts, len(peer))]
    return [arriving(reservations, sequence, pool) for sequence in sequences]


def test_a_peer_holds_a_quarter_of_the_pool_unclaimed_and_one_offer_more() -> None:
    pool = BlockPool(36, 4)
    reservations = Reservations(pool)
    first, *_ = held(reservations, pool, "prefill-0-1", 3)  # 9 blocks
    assert reservations.displace() == [], "a quarter is not too much"
    reservations.add(more := reservation(10, [7, 8, 9]))
    assert reservations.head() is None
    reservations.add(other := reservation(11, [7, 8, 9], "prefill-1-1"))
    assert reservations.head() is other, "others pass"
    reservations.claim(first)
    assert reservations.head() is more


def test_a_displaced_peer_waits_until_its_claim() -> None:
    pool = BlockPool(36, 4)
    reservations = Reservations(pool)
    (small,) = held(reservations, pool, "prefill-0-1", 1)
    large = arriving(reservations, reservation(10, [1] * 40), pool)
    assert reservations.displace() == [10] and reservations.displace() == []
    reservations.remove(large)
    assert reservations.unclaimed.num_held == len(small.block_table)
    reservations.add(again := reservation(11, [1] * 40))
    reservations.add(more := reservation(12, [7, 8, 9]))
    assert reservations.head() is more, "this is within the part"
    reservations.claim(again)
    assert reservations.head() is again


def test_claimed_reservations_go_first_and_without_limit() -> None:
    pool = BlockPool(36, 4)
    reservations = Reservations(pool)
    held(reservations, pool, "prefill-0-1", 6)
    waiting = [reservation(number, [number, 8, 9]) for number in (20, 21)]
    for sequence in waiting:
        reservations.add(sequence)
    reservations.claim(waiting[1])
    assert reservations.head() is waiting[1]
    reservations.grant(waiting[1])
    assert reservations.head() is None


@given(st.lists(st.tuples(st.sampled_from("agcr"), st.integers(0, 9)), max_size=60))
def test_the_counts_of_unclaimed_blocks_are_those_of_what_arrives(
    moves: list[tuple[str, int]],
) -> None:
    pool = BlockPool(200, 4)
    reservations = Reservations(pool)
    sequences = [reservation(i, [i, *PROMPT], f"prefill-{i % 3}-1") for i in range(10)]
    waiting, arrived = set[int](), set[int]()
    for move, i in moves:
        sequence = sequences[i]
        if move == "a" and i not in waiting | arrived:
            reservations.add(sequence)
            waiting.add(i)
        elif move == "g" and i in waiting:
            sequence.block_table.extend(pool.allocate(pool.blocks_for(sequence.num_tokens + 1)))
            reservations.grant(sequence)
            waiting.remove(i)
            arrived.add(i)
        elif move == "c" and i in waiting | arrived:
            reservations.claim(sequence)
        elif move == "r" and i in waiting | arrived:
            reservations.remove(sequence)
            pool.free(sequence.block_table)
            del sequence.block_table[:]
            waiting.discard(i)
            arrived.discard(i)
        unclaimed = [sequences[j] for j in arrived if not sequences[j].is_claimed]
        assert reservations.unclaimed.num_held == sum(len(s.block_table) for s in unclaimed)


TOTAL = 40


def test_the_only_one_may_be_of_any_size() -> None:
    assert Unclaimed(1).may_hold("a")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=60))
def test_held_amounts_are_summed_and_bounded(moves: list[tuple[int, int]]) -> None:
    unclaimed, held = Unclaimed(TOTAL), dict[int, int]()
    for request_id, amount in moves:
        peer = request_id % 3
        if request_id in held:
            unclaimed.release(request_id)
            del held[request_id]
        elif unclaimed.may_hold(peer):
            unclaimed.hold(request_id, peer, amount)
            held[request_id] = amount
            of_peer = sum(held[each] for each in held if each % 3 == peer)
            assert of_peer < TOTAL / PEER_PART + amount
            assert sum(held.values()) < TOTAL / PART_OF_ALL + amount
        assert unclaimed.num_held == sum(held.values())
    displaced = unclaimed.displace()
    assert all(PEER_PART * count <= TOTAL for count in unclaimed.held_by.values())
    assert unclaimed.num_held == sum(held[each] for each in held.keys() - set(displaced))
    for request_id in range(10):
        unclaimed.release(request_id)
        unclaimed.release(request_id)
    assert unclaimed.num_held == 0 and not unclaimed.held_by
