"""Figures of a record."""

from __future__ import annotations

from router.core.history.record import Record
from router.core.request import Request
from tests.router.core import states
from wire.options import Options


def test_a_record_is_in_flight_until_its_prompt_was_read() -> None:
    state = states.state(Request((1, 2), Options(), 1))
    record = Record(1, "r", "", "", 2, 0.0, state)
    assert record.is_in_flight
    state.first_at = 1.0
    assert not record.is_in_flight
    record.progress = None
    assert not record.is_in_flight


def test_the_size_is_that_of_the_tokens() -> None:
    record = Record(1, "r", "", "", 2, 0.0, None)
    assert record.size == 0
    record.chain = bytes(8)
    assert record.size == 8
