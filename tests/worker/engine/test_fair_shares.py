"""Max-min fairness: nobody gets more while another, who gets less, still needs tokens."""

import hypothesis.strategies as st
from hypothesis import given

from worker.engine.fair_shares import Shares

NEEDS = st.dictionaries(st.integers(0, 9), st.integers(1, 40), min_size=1)


def test_a_small_need_leaves_the_rest_to_others() -> None:
    shares = Shares({1: 100, 2: 3, 3: 100}, 33)
    assert [shares.left(tenant) for tenant in (1, 2, 3, 4)] == [15, 3, 15, 0]


def test_spent_tokens_are_gone() -> None:
    shares = Shares({1: 8, 2: 8}, 8)
    assert not shares.has_spent(1)
    shares.spend(1, 3)
    assert (shares.left(1), shares.left(2)) == (1, 4)
    assert shares.has_spent(1) and not shares.has_spent(2)


@given(needs=NEEDS, total=st.integers(0, 100))
def test_shares_are_fair_and_none_is_lost(needs: dict[int, int], total: int) -> None:
    shares = Shares(needs, total)
    given_ = {tenant: shares.left(tenant) for tenant in needs}
    assert sum(given_.values()) == min(total, sum(needs.values()))
    hungry = [given_[tenant] for tenant, need in needs.items() if given_[tenant] < need]
    assert all(given_[tenant] <= min(hungry, default=needs[tenant]) + 1 for tenant in needs)
