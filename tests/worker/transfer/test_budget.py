"""Whose turn it is, and that the shares of all are never more than there is."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from wire.layout import KVLayout
from wire.payloads import Offer
from wire.transfer import KVReceiver
from worker.transfer.budget import TransferBudget
from worker.transfer.incoming import IncomingTransfer

LAYOUT = KVLayout.uniform(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8"
)  # 2 bytes a token
BUDGET, CREDIT = 100, 60
IDS = count(1)


def transfer(
    wanted_bytes: int, peer: bytes = b"prefill-0-1", *, is_claimed: bool = True
) -> IncomingTransfer:
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
    return IncomingTransfer(peer, receiver)


def test_each_waits_for_its_share_and_none_overtakes() -> None:
    started: list[IncomingTransfer] = []
    budget = TransferBudget(BUDGET, started.append)
    one, large, small = transfer(60), transfer(50), transfer(4)
    for each in (one, large, small):
        budget.wait(each)
    assert started == [one] and budget.free_bytes == 40
    assert len(budget) == 2  # the small one would fit
    budget.end(one)
    assert started == [one, large, small] and budget.free_bytes == 46


def test_a_peer_that_sends_nothing_stops_no_other() -> None:
    started: list[IncomingTransfer] = []
    budget = TransferBudget(BUDGET, started.append)
    silent = [transfer(14, is_claimed=False) for _ in range(5)]
    for each in silent:
        budget.wait(each)
    assert started == silent[:2], "it has a quarter of the bytes, and what is one share over it"
    budget.wait(other := transfer(14, b"prefill-1-1", is_claimed=False))
    assert started == [*silent[:2], other]
    budget.end(silent[0])
    assert started == [*silent[:2], other, silent[2]]


def test_what_a_router_has_asked_for_goes_first_and_has_half_of_the_bytes() -> None:
    started: list[IncomingTransfer] = []
    budget = TransferBudget(BUDGET, started.append)
    silent = [transfer(26, b"prefill-%d-1" % i, is_claimed=False) for i in range(4)]
    for each in silent:
        budget.wait(each)
    assert started == silent[:2], "half of them, from however many peers"
    budget.wait(asked := transfer(40))
    assert started == [*silent[:2], asked]
    silent[3].receiver.claim(0.0)
    budget.claim(silent[3])
    assert silent[3] not in started, "there are 8 bytes"
    budget.end(asked)
    assert started == [*silent[:2], asked, silent[3]]


def test_what_was_asked_for_meanwhile_makes_room_for_another() -> None:
    started: list[IncomingTransfer] = []
    budget = TransferBudget(BUDGET, started.append)
    silent = [transfer(14, is_claimed=False) for _ in range(5)]
    for each in silent:
        budget.wait(each)
    assert started == silent[:2]
    silent[0].receiver.claim(0.0)
    budget.claim(silent[0])
    assert started == silent[:3]


def test_what_has_no_bytes_has_a_share_all_the_same() -> None:
    budget = TransferBudget(BUDGET, lambda each: None)
    budget.wait(empty := transfer(0))
    assert empty.share_bytes, "without one its end is not noticed"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 45)), max_size=40))
def test_no_byte_is_lost_or_given_twice(steps: list[tuple[bool, int]]) -> None:
    budget, all_of_them = TransferBudget(BUDGET, lambda each: None), list[IncomingTransfer]()
    for is_new, number in steps:
        if is_new:
            all_of_them.append(
                transfer(2 * number, b"prefill-%d-1" % (number % 3), is_claimed=number % 2 == 0)
            )
            budget.wait(all_of_them[-1])
        elif all_of_them:
            budget.end(all_of_them[number % len(all_of_them)])
        assert budget.free_bytes + sum(each.share_bytes for each in all_of_them) == BUDGET
        assert budget.free_bytes >= 0
    for each in all_of_them:
        budget.end(each)
    assert (budget.free_bytes, len(budget)) == (BUDGET, 0)
