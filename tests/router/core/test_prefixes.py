from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.prefixes import PrefixIndex


def index_of(**num_blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    for name, num in num_blocks.items():
        index.add(name.encode(), num)
    return index


def test_each_worker_has_its_own_match() -> None:
    index = index_of(d=10, e=10, f=10)
    index.store(b"d", [1, 2, 3, 4, 5])
    index.store(b"e", [1, 2, 7])
    assert index.matches([1, 2, 3, 4, 6]) == {b"d": 4, b"e": 2}
    assert index.matches([2]) == {b"d": 1, b"e": 1}
    assert index.matches([9, 1]) == index.matches([]) == {}


def test_evicted_blocks_end_the_prefix() -> None:
    index = index_of(d=10)
    index.store(b"d", [1, 2, 3])
    index.evict(b"d", [2, 3, 77])
    assert index.matches([1, 2, 3]) == {b"d": 1}


def test_unknown_workers_hold_nothing() -> None:
    index = PrefixIndex()
    index.store(b"x", [1])
    index.evict(b"x", [1])
    assert index.matches([1]) == {} and index.size(b"x") == 0
    index.add(b"x", 4)
    index.store(b"x", [1])
    index.remove(b"x")
    index.remove(b"x")
    assert index.matches([1]) == {}


def test_a_prompt_over_the_bound_loses_its_end_and_older_prompts_go_first() -> None:
    index = index_of(d=4)
    index.store(b"d", [1, 2])
    index.store(b"d", [11, 12, 13])
    assert index.matches([11, 12, 13]) == {b"d": 3}
    assert index.matches([1, 2]) == {b"d": 1}
    index.store(b"d", [21, 22, 23, 24, 25, 26])
    assert index.matches([21, 22, 23, 24, 25, 26]) == {b"d": 4}


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 50), max_size=20)), max_size=30))
def test_no_worker_is_taken_to_hold_more_than_it_has_blocks(
    steps: list[tuple[bool, list[int]]],
) -> None:
    index = index_of(d=7)
    for is_stored, hashes in steps:
        if is_stored:
            index.store(b"d", hashes)
        else:
            index.evict(b"d", hashes)
            assert not hashes or index.matches(hashes) == {}
        assert index.size(b"d") <= 7


@given(st.lists(st.tuples(st.sampled_from([b"d", b"e"]), st.integers(0, 12)), max_size=9))
def test_the_search_finds_the_longest_prefix_that_was_stored(
    stores: list[tuple[bytes, int]],
) -> None:
    index, longest = index_of(d=99, e=99), {b"d": 0, b"e": 0}
    for identity, num in stores:
        index.store(identity, range(num))
        longest[identity] = max(longest[identity], num)
    for length in range(13):
        expected = {name: min(num, length) for name, num in longest.items() if num and length}
        assert index.matches(range(length)) == expected


def test_a_worker_fills_no_more_memory_than_any_has_blocks() -> None:
    index = PrefixIndex(max_held=8)
    index.add(b"d", 2**31 - 1)
    for start in range(0, 100, 10):
        index.store(b"d", range(start, start + 10))
    assert index.size(b"d") == 8
