"""The index finds what it was given, and evicts what is cheapest to lose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.worker.tiers.chains import chain
from worker.tiers.index import Index
from worker.tiers.keys import BlockKey


def filled(*keys: BlockKey, context_blocks: int = 100) -> Index[int]:
    index = Index[int](len(keys), context_blocks)
    for place, key in enumerate(keys):
        index.add(key, place)
    return index


def test_tokens_are_compared() -> None:
    (key,) = chain(1)
    index = filled(key)
    assert index.get(key) == 0 and key.digest in index
    assert index.get(key._replace(tokens=b"othr")) is None, "as if two digests were equal"
    assert index.get(chain(2)[0]) is None


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    keys = chain(1, 2, 3)
    index = filled(*keys)
    assert [index.evict().key for _ in keys] == keys[::-1]


def test_of_equal_chains_the_one_used_longest_ago_goes_first() -> None:
    one, two, three = chain(1)[0], chain(2)[0], chain(3)[0]
    index = filled(one, two, three)
    index.use(one.digest)
    index.use(b"unknown")
    assert [index.evict().key for _ in range(3)] == [two, three, one]


def test_what_takes_longer_to_compute_stays() -> None:
    short, long = chain(1), chain(*range(2, 9))
    index = filled(*long, *short, context_blocks=4)
    assert index.evict().key == short[0]


def test_what_was_used_often_gives_way_in_time() -> None:
    index, (old,) = Index[int](2, 1000), chain(1)
    index.add(old, 0)
    for _ in range(3):
        index.use(old.digest)
    evicted = []
    for token in range(2, 9):
        if index.is_full:
            evicted.append(index.evict().key)
        index.add(chain(token)[0], 0)
    assert old in evicted[2:]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=80))
def test_no_block_is_lost_or_evicted_twice(actions: list[tuple[int, int, bool]]) -> None:
    index, held = Index[int](9, 5), set[bytes]()
    for first, second, is_use in actions:
        for key in chain(first, second, first):
            if key.digest in index:
                assert key.digest in held
                if is_use:
                    index.use(key.digest)
                elif first == second:
                    held.remove(index.remove(key).key.digest)
                continue
            if index.is_full:
                held.remove(index.evict().key.digest)
            index.add(key, 0)
            held.add(key.digest)
            assert len(index) == len(held) <= 9
    for _ in range(len(index)):
        held.remove(index.evict().key.digest)
    assert not held
