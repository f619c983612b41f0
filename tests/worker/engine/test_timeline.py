"""The timeline of one sequence: its first chunks and preemptions, and the number of all."""

from __future__ import annotations

from wire.timeline import Entry, Kind
from worker.engine.timeline import MAX_CHUNKS, MAX_PREEMPTIONS, Timeline


def test_chunks_beyond_the_first_are_only_counted() -> None:
    timeline = Timeline()
    for number in range(MAX_CHUNKS + 5):
        timeline.add_chunk(float(number), number + 0.5, 16)
    whole, *chunks = timeline.on_first_token(50.0)
    assert whole == Entry(Kind.PREFILL, 0.0, 50.0, MAX_CHUNKS + 5)
    assert chunks == [Entry(Kind.CHUNK, float(it), 0.5, 16) for it in range(MAX_CHUNKS)]
    assert timeline.is_read and timeline.first_s == 50.0


def test_a_preemption_before_the_first_token_is_told_with_it_and_not_again() -> None:
    timeline = Timeline()
    timeline.preempted_s = 1.0
    timeline.resume(7, 1.5)
    timeline.add_chunk(2.0, 3.0, 4)
    assert timeline.on_first_token(3.0)[-1] == Entry(Kind.PREEMPTION, 1.0, 0.5, 7)
    for number in range(MAX_PREEMPTIONS + 3):
        timeline.preempted_s = float(number)
        timeline.resume(8, number + 0.25)
    assert len(timeline.preemptions) == MAX_PREEMPTIONS
    assert {it.amount for it in timeline.preemptions} == {8}
