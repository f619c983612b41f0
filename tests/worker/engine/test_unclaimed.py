"""What is held that nobody asked for, by peer and in all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.unclaimed import PART_OF_ALL, PEER_PART, Unclaimed

TOTAL = 40


def test_a_peer_has_a_quarter_and_all_have_half() -> None:
    unclaimed = Unclaimed(TOTAL)
    unclaimed.hold(1, "a", 9)
    assert unclaimed.may_hold("a"), "one more is let in"
    unclaimed.hold(2, "a", 9)
    assert not unclaimed.may_hold("a") and unclaimed.may_hold("b")
    unclaimed.hold(3, "b", 2)
    assert not unclaimed.may_hold("b") and not unclaimed.may_hold("c")
    unclaimed.release(1)
    assert unclaimed.may_hold("a") and unclaimed.may_hold("c")


def test_the_only_one_may_be_of_any_size() -> None:
    assert Unclaimed(1).may_hold("a")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=60))
def test_what_is_held_is_the_sum_and_bounded(moves: list[tuple[int, int]]) -> None:
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
    for request_id in range(10):
        unclaimed.release(request_id)
        unclaimed.release(request_id)
    assert unclaimed.num_held == 0 and not unclaimed._by_peer
