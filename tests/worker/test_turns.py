"""Whose turn it is, and that the shares of all are never more than there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wire.payloads import KVLayout, Offer
from wire.transfer import KVReceiver
from worker.turns import Reception, Turns

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8")  # 2 bytes a token
BUDGET, CREDIT = 100, 60


def reception(wanted_bytes: int) -> Reception:
    num_tokens = wanted_bytes // LAYOUT.token_bytes
    offer = Offer(
        layout=LAYOUT,
        num_tokens=num_tokens,
        total_bytes=num_tokens * LAYOUT.token_bytes,
        token_ids=bytes(4 * num_tokens),
    )
    receiver = KVReceiver(
        1, offer, layout=LAYOUT, max_bytes=1000, credit_bytes=CREDIT, lease_s=1.0, now=0.0
    )
    return Reception(b"prefill-0-1", receiver, CREDIT)


def test_each_waits_for_its_share_and_none_overtakes() -> None:
    started: list[Reception] = []
    turns = Turns(BUDGET, started.append)
    one, large, small = reception(60), reception(50), reception(4)
    for each in (one, large, small):
        turns.wait(each)
    assert started == [one] and turns.free_bytes == 40
    assert large in turns and small in turns  # the small one would fit
    turns.end(one)
    assert started == [one, large, small] and turns.free_bytes == 46


def test_more_than_the_credit_is_never_in_flight() -> None:
    turns = Turns(BUDGET, lambda each: None)
    turns.wait(long := reception(90))
    assert long.share_bytes == CREDIT


def test_one_that_leaves_the_line_lets_those_behind_it_go() -> None:
    started: list[Reception] = []
    turns = Turns(BUDGET, started.append)
    one, large, small = reception(60), reception(50), reception(4)
    for each in (one, large, small):
        turns.wait(each)
    turns.end(large)
    assert started == [one, small] and len(turns) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 45)), max_size=40))
def test_no_byte_is_lost_or_given_twice(steps: list[tuple[bool, int]]) -> None:
    turns, all_of_them = Turns(BUDGET, lambda each: None), list[Reception]()
    for is_new, number in steps:
        if is_new:
            all_of_them.append(reception(2 * number))
            turns.wait(all_of_them[-1])
        elif all_of_them:
            turns.end(all_of_them[number % len(all_of_them)])
        assert turns.free_bytes + sum(each.share_bytes for each in all_of_them) == BUDGET
        assert turns.free_bytes >= 0
    for each in all_of_them:
        turns.end(each)
    assert (turns.free_bytes, len(turns)) == (BUDGET, 0)
