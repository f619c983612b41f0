"""Pauses between the tries of an outage, and that the tries never end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.aio.reconnect import BRIEF_S, MAX_BRIEF_S, MAX_S, TRY_S, Reconnect, pauses

JITTERS = st.lists(st.floats(0, 1), min_size=160, max_size=160)


def some(jitters: list[float]) -> list[float]:
    """The pauses of an outage, one for each jitter."""
    draw = iter(jitters).__next__
    return list(islice(pauses(draw), len(jitters)))


def test_without_jitter_they_double_to_half_a_second_and_later_to_thirty() -> None:
    found = some([0.0] * 80)
    assert found[:5] == [0.1, 0.2, 0.4, 0.5, 0.5]
    later = found.index(1.0)
    assert found[later:] == [1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * (len(found) - later - 5)]


@given(JITTERS)
def test_pauses_are_short_in_a_short_outage_whatever_the_jitter(jitters: list[float]) -> None:
    found = some(jitters)
    for pause_s, waited_s in zip(found, accumulate(found, initial=0.0), strict=False):
        assert pause_s <= (MAX_BRIEF_S if waited_s < BRIEF_S else MAX_S)
    assert all(MAX_S / 2 <= pause_s for pause_s in found[-10:])


class Outage:
    """A dial with its one timer, which goes off when it is told to."""

    def __init__(self) -> None:
        self.num_tries = 0
        self.waits_s: float | None = None
        self.reconnect = Reconnect(self.connect, self.call_later, lambda: 0.0)

    def connect(self) -> None:
        self.num_tries += 1

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Outage:
        self.waits_s, self._callback = delay_s, callback
        return self

    def cancel(self) -> None:
        self.waits_s = None

    def pass_time(self) -> None:
        assert self.waits_s is not None
        self.waits_s = None
        self._callback()


def test_each_failure_is_followed_by_a_longer_pause_and_another_try() -> None:
    outage = Outage()
    waited_s = []
    for _ in range(4):
        outage.reconnect.fail()
        waited_s.append(outage.waits_s)
        outage.pass_time()
    assert (waited_s, outage.num_tries) == ([0.1, 0.2, 0.4, 0.5], 4)


def test_a_try_whose_end_nobody_tells_is_followed_by_another() -> None:
    outage = Outage()
    for tries in (1, 2, 3):
        assert outage.waits_s == TRY_S
        outage.pass_time()
        assert outage.num_tries == tries


def test_success_ends_the_tries_and_the_next_outage_is_a_new_one() -> None:
    outage = Outage()
    for _ in range(3):
        outage.reconnect.fail()
    outage.reconnect.succeed()
    assert outage.waits_s is None
    outage.reconnect.fail()
    assert outage.waits_s == 0.1


@pytest.mark.parametrize("news", [Reconnect.fail, Reconnect.stop])
def test_nothing_is_tried_after_the_end(news: Callable[[Reconnect], None]) -> None:
    outage = Outage()
    outage.reconnect.stop()
    news(outage.reconnect)
    assert outage.waits_s is None
