"""The timeline of an attempt: a worker's times between the router's own, whatever it claims."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.history.record import Placed
from router.core.history.timeline import AttemptTimeline, timeline
from wire.timeline import MAX_ENTRIES, Entry, Kind, pack_timeline


def attempt(
    prefill: list[Entry], decode: list[Entry], asked_at: float | None = 12.5
) -> AttemptTimeline:
    placed = Placed(b"prefill-0-1", b"decode-0-1", None, 11.0, 5)
    placed.read_at, placed.prefill_timeline = 12.5, pack_timeline(prefill)
    placed.asked_at, placed.decode_timeline, placed.kv_bytes = asked_at, pack_timeline(decode), 96
    placed.end(14.5, "stop")
    return timeline(placed, 10.5, 10.0, {7: "other"}.get)


def test_parts_of_both_workers_are_placed_on_the_clock_of_the_request() -> None:
    # The clocks of the workers are far off; 0.1 s of each round trip was on the wire.
    found = attempt(
        [
            Entry(Kind.REQUEST, 900.0, 1.4),
            Entry(Kind.PREFILL, 900.4, 1.0, 2),
            Entry(Kind.CHUNK, 900.4, 0.5, 32),
            Entry(Kind.CHUNK, 900.9, 0.5, 8),
        ],
        [
            Entry(Kind.REQUEST, 50.0, 1.9),
            Entry(Kind.TRANSFER, 49.0, 0.9, 1),
            Entry(Kind.SEGMENT, 49.5, 0.25, 96),
            Entry(Kind.DECODE, 50.1, 1.8, 30),
            Entry(Kind.STEP_P50, 50.1, 0.05),
            Entry(Kind.STEP_P99, 50.1, 0.3),
            Entry(Kind.STEP_MAX, 50.5, 0.3),
            Entry(Kind.STALL, 50.5, 0.3, 512),
            Entry(Kind.PREEMPTION, 51.0, 0.2, 7),
            Entry(Kind.PREEMPTION, 51.5, 0.1, 8),
        ],
    )
    assert msgspec.to_builtins(found) == {
        "queue_s": 0.5,
        "at_s": 1.0,
        "duration_s": 3.5,
        "outcome": "stop",
        "failed": None,
        "first_token_s": 2.5,
        "prefill": {
            "at_s": 1.45,
            "duration_s": 1.0,
            "queue_s": 0.4,
            "num_chunks": 2,
            "chunks": [
                {"at_s": 1.45, "duration_s": 0.5, "tokens": 32},
                {"at_s": 1.95, "duration_s": 0.5, "tokens": 8},
            ],
        },
        "transfer": {
            "at_s": 1.55,
            "duration_s": 0.9,
            "bytes": 96,
            "num_segments": 1,
            "segments": [{"at_s": 2.05, "duration_s": 0.25, "bytes": 96}],
        },
        "decode": {
            "at_s": 2.65,
            "duration_s": 1.8,
            "num_steps": 30,
            "step_p50_s": 0.05,
            "step_p99_s": 0.3,
            "step_max_s": 0.3,
            "stalls": [{"at_s": 3.05, "duration_s": 0.3, "prompt_tokens": 512}],
        },
        "preemptions": [
            {"at_s": 3.55, "duration_s": 0.2, "by": "other"},
            {"at_s": 4.05, "duration_s": 0.1, "by": None},
        ],
    }


ENTRIES = st.lists(
    st.builds(
        Entry,
        st.sampled_from(Kind),
        st.floats(0, 4294),
        st.floats(0, 1e6),
        st.integers(0, 2**64 - 1),
    ),
    max_size=MAX_ENTRIES,
)


@given(ENTRIES, ENTRIES, st.none() | st.floats(12.5, 14.5))
def test_whatever_workers_claim_stays_within_the_attempt(
    prefill: list[Entry], decode: list[Entry], asked_at: float | None
) -> None:
    found = attempt(prefill, decode, asked_at)
    raw = msgspec.to_builtins(found)
    spans = [raw[name] for name in ("prefill", "transfer", "decode") if raw[name]]
    for name in ("chunks", "segments", "stalls"):
        spans += [each for span in spans for each in span.get(name, ())]
    for span in spans + raw["preemptions"]:
        assert 1.0 <= span["at_s"] <= span["at_s"] + span["duration_s"] <= 4.5 + 1e-5
    assert len(msgspec.json.encode(found)) < 32_000


def test_an_attempt_that_runs_has_no_end_and_one_that_failed_says_who_did() -> None:
    placed = Placed(b"prefill-0-1", b"decode-0-1", None, 11.0, 5)
    found = timeline(placed, 10.0, 10.0, lambda _: None)
    assert (found.duration_s, found.outcome, found.prefill, found.decode) == (None,) * 4
    placed.end(11.5, "worker_lost")
    placed.end(12.0, "stop")
    found = timeline(placed, 10.0, 10.0, lambda _: None)
    assert found.outcome == "worker_lost" and found.duration_s == pytest.approx(0.5)
