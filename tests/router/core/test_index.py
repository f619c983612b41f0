from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.index import PrefixIndex


def test_the_longest_held_prefix_is_counted_in_blocks() -> None:
    index = PrefixIndex()
    index.add(b"d", 10)
    index.store(b"d", [1, 2, 3])
    assert index.longest(b"d", [1, 2, 3, 4]) == 3
    assert index.longest(b"d", [1, 9, 3]) == 1
    assert index.longest(b"d", [9, 2]) == 0
    assert index.longest(b"d", []) == 0


def test_evicted_blocks_end_the_prefix() -> None:
    index = PrefixIndex()
    index.add(b"d", 10)
    index.store(b"d", [1, 2, 3])
    index.evict(b"d", [2, 77])
    assert index.longest(b"d", [1, 2, 3]) == 1


def test_unknown_workers_hold_nothing() -> None:
    index = PrefixIndex()
    index.store(b"x", [1])
    index.evict(b"x", [1])
    assert index.longest(b"x", [1]) == index.size(b"x") == 0
    index.add(b"x", 4)
    index.store(b"x", [1])
    index.remove(b"x")
    index.remove(b"x")
    assert index.longest(b"x", [1]) == 0


def test_a_chain_over_the_bound_loses_its_tail_and_older_chains_go_first() -> None:
    index = PrefixIndex()
    index.add(b"d", 4)
    index.store(b"d", [1, 2])
    index.store(b"d", [11, 12, 13])
    assert index.longest(b"d", [11, 12, 13]) == 3
    assert index.longest(b"d", [1, 2]) == 1
    index.store(b"d", [21, 22, 23, 24, 25, 26])
    assert index.longest(b"d", [21, 22, 23, 24, 25, 26]) == 4


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 50), max_size=20)), max_size=30))
def test_no_worker_is_taken_to_hold_more_than_it_has_blocks(
    steps: list[tuple[bool, list[int]]],
) -> None:
    index = PrefixIndex()
    index.add(b"d", 7)
    for is_stored, hashes in steps:
        if is_stored:
            index.store(b"d", hashes)
            if len(set(hashes)) == len(hashes):
                assert index.longest(b"d", hashes) == min(7, len(hashes))
        else:
            index.evict(b"d", hashes)
            assert not hashes or index.longest(b"d", hashes) == 0
        assert index.size(b"d") <= 7


def test_a_worker_fills_no_more_memory_than_any_has_blocks() -> None:
    table = PrefixIndex(max_held=8)
    table.add(b"d", 2**31 - 1)
    for start in range(0, 100, 10):
        table.store(b"d", range(start, start + 10))
    assert table.size(b"d") == 8
