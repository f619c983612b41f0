"""Timelines: packed relative to their first event, bounded, and harmless whatever they say."""

from __future__ import annotations

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import RemoteProtocolError
from wire.payloads import (
    PrefillResult,
    Usage,
    decode_prefill_result,
    decode_usage,
    encode_map,
    encode_prefill_result,
)
from wire.timeline import MAX_ENTRIES, Entry, Kind, pack_timeline, unpack_timeline

TIMES = st.floats(0, 4000).map(lambda it: round(it, 6))


@given(st.lists(st.builds(Entry, st.sampled_from(Kind), TIMES, TIMES, st.integers(0, 2**64 - 1))))
def test_entries_come_back_relative_to_the_first_event(entries: list[Entry]) -> None:
    zero_s = min([it.start_s for it in entries[:MAX_ENTRIES]], default=0.0)
    back = unpack_timeline(pack_timeline(entries))
    assert len(back) == min(len(entries), MAX_ENTRIES)
    for entry, found in zip(entries, back, strict=False):
        assert (found.kind, found.amount) == (entry.kind, entry.amount)
        assert found.start_s == pytest.approx(entry.start_s - zero_s, abs=1e-6)
        assert found.duration_s == pytest.approx(entry.duration_s, abs=1e-6)


def test_durations_beyond_the_field_are_cut_and_negative_ones_are_0() -> None:
    entries = [Entry(Kind.REQUEST, 5.0, 1e6), Entry(Kind.DECODE, 6.0, -1.0)]
    assert [it.duration_s for it in unpack_timeline(pack_timeline(entries))] == [4294.967295, 0.0]


def test_an_unknown_kind_is_skipped() -> None:
    packed = pack("<IIIQ", 99, 0, 1, 2) + pack_timeline([Entry(Kind.CHUNK, 0.0, 1.0, 3)])
    assert unpack_timeline(packed) == [Entry(Kind.CHUNK, 0.0, 1.0, 3)]


@pytest.mark.parametrize("num_bytes", [1, 19, 21, 20 * MAX_ENTRIES + 20])
def test_a_wrong_length_is_refused_where_it_is_decoded(num_bytes: int) -> None:
    timeline = bytes(num_bytes)
    with pytest.raises(RemoteProtocolError, match="timeline"):
        decode_usage(encode_map(Usage(finish_reason="stop", timeline=timeline)))
    with pytest.raises(RemoteProtocolError, match="timeline"):
        decode_prefill_result(encode_prefill_result(PrefillResult(token_id=1, timeline=timeline)))
