from __future__ import annotations

from itertools import islice, pairwise

from router.core.request_ids import RequestIds

EPOCH = 7
MANY = 50_000


def test_no_id_comes_twice_and_all_are_of_the_epoch() -> None:
    ids = list(islice(RequestIds(EPOCH), MANY))
    assert len(set(ids)) == MANY
    assert {each >> 32 for each in ids} == {EPOCH}


def test_who_knows_some_cannot_tell_the_next() -> None:
    ids = list(islice(RequestIds(EPOCH), MANY))
    steps = {(later - earlier) % 2**32 for earlier, later in pairwise(ids)}
    assert len(steps) > 0.99 * MANY, "no step is a rule"
    again = list(islice(RequestIds(EPOCH), MANY))
    assert len(set(ids) & set(again)) < MANY / 100, "another process draws another key"


def test_the_key_is_all_that_decides() -> None:
    assert next(RequestIds(EPOCH, b"one")) == next(RequestIds(EPOCH, b"one"))
    assert next(RequestIds(EPOCH, b"one")) != next(RequestIds(EPOCH, b"two"))
