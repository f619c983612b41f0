"""Whose turn it is, and that the shares of all are never more than there is."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from wire.payloads import KVLayout, Offer
from wire.transfer import KVReceiver
from worker.turns import Reception, Turns

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8")  # 2 bytes a token
BUDGET, CREDIT = 100, 60
IDS = count(1)


def reception(
    wanted_bytes: int, peer: bytes = b"prefill-0-1", *, is_claimed: bool = True
) -> Reception:
    num_tokens = wanted_bytes // LAYOUT.token_bytes
    offer = Offer(
        layout=LAYOUT,
        num_tokens=num_tokens,
        total_bytes=num_tokens * LAYOUT.token_bytes,
        token_ids=bytes(4 * num_tokens),
    )
    receiver = KVReceiver(
        next(IDS), offer, layout=LAYOUT, max_bytes=1000, credit_bytes=CREDIT, lease_s=1.0, now=0.0
    )
    if is_claimed:
        receiver.claim(0.0)
    return Reception(peer, receiver, CREDIT)


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


def test_a_peer_that_sends_nothing_stops_no_other() -> None:
    started: list[Reception] = []
    turns = Turns(BUDGET, started.append)
    silent = [reception(14, is_claimed=False) for _ in range(5)]
    for each in silent:
        turns.wait(each)
    assert started == silent[:2], "it has a quarter of the bytes, and what is one share over it"
    turns.wait(other := reception(14, b"prefill-1-1", is_claimed=False))
    assert started == [*silent[:2], other]
    turns.end(silent[0])
    assert started == [*silent[:2], other, silent[2]]


def test_what_a_router_has_asked_for_goes_first_and_has_half_of_the_bytes() -> None:
    started: list[Reception] = []
    turns = Turns(BUDGET, started.append)
    silent = [reception(26, b"prefill-%d-1" % i, is_claimed=False) for i in range(4)]
    for each in silent:
        turns.wait(each)
    assert started == silent[:2], "half of them, from however many peers"
    turns.wait(asked := reception(40))
    assert started == [*silent[:2], asked]
    silent[3].receiver.claim(0.0)
    turns.claim(silent[3])
    assert silent[3] in turns, "there are 8 bytes"
    turns.end(asked)
    assert started == [*silent[:2], asked, silent[3]]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 45)), max_size=40))
def test_no_byte_is_lost_or_given_twice(steps: list[tuple[bool, int]]) -> None:
    turns, all_of_them = Turns(BUDGET, lambda each: None), list[Reception]()
    for is_new, number in steps:
        if is_new:
            all_of_them.append(
                reception(2 * number, b"prefill-%d-1" % (number % 3), is_claimed=number % 2 == 0)
            )
            turns.wait(all_of_them[-1])
        elif all_of_them:
            turns.end(all_of_them[number % len(all_of_them)])
        assert turns.free_bytes + sum(each.share_bytes for each in all_of_them) == BUDGET
        assert turns.free_bytes >= 0
    for each in all_of_them:
        turns.end(each)
    assert (turns.free_bytes, len(turns)) == (BUDGET, 0)
