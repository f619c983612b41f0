"""The timeline of a request at a worker, packed into 20 bytes an entry.  SPEC 4.10.

A worker that is asked for it (`Options.timeline`) adds its timeline to PREFILL_DONE and
DECODE_DONE.  Times are relative to the earliest start of its entries, because clocks of machines
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct, iter_unpack
from typing import Annotated, Final, NamedTuple

import msgspec

from wire.errors import RemoteProtocolError

MAX_ENTRIES: Final = 128
ENTRY: Final = Struct("<IIIQ")
_US_PER_S: Final = 1e6
_MAX_US: Final = 2**32 - 1
PackedTimeline = Annotated[bytes, msgspec.Meta(max_length=MAX_ENTRIES * ENTRY.size)]


class Kind(IntEnum):
    """The subject of an entry, and the meaning of its amount.

    REQUEST lasts from reading PREFILL_REQUEST or DECODE_REQUEST until the timeline was packed.
    PREFILL, TRANSFER and DECODE are whole phases, with their numbers of chunks, segments and steps;
    CHUNK has tokens, SEGMENT bytes, STALL the prompt tokens that were prefilled in the same step,
    PREEMPTION the request_id that got the blocks.  STEP_P50, STEP_P99 and STEP_MAX have only a
    duration.
    """

    REQUEST = 0
    PREFILL = 1
    CHUNK = 2
    TRANSFER = 3
    SEGMENT = 4
    DECODE = 5
    STEP_P50 = 6
    STEP_P99 = 7
    STEP_MAX = 8
    STALL = 9
    PREEMPTION = 10


_KINDS: Final = {int(kind): kind for kind in Kind}


class Entry(NamedTuple):
    """One entry; times are in seconds."""

    kind: Kind
    start_s: float
    duration_s: float
    amount: int = 0


def pack_timeline(entries: Sequence[Entry]) -> bytes:
    """Pack entries, whose times are on one clock, relative to the earliest start.

    Times over 4294 s are cut to that, and entries beyond `MAX_ENTRIES` left out.
    """
    known = entries[:MAX_ENTRIES]
    zero_s = min([entry.start_s for entry in known], default=0.0)
    return b"".join(
        [
            ENTRY.pack(kind, _microseconds(start_s - zero_s), _microseconds(duration_s), amount)
            for kind, start_s, duration_s, amount in known
        ]
    )


def unpack_timeline(packed: bytes) -> list[Entry]:
    """Return the entries, relative to the earliest start.  Skip unknown kinds."""
    return [
        Entry(_KINDS[kind], start / _US_PER_S, duration / _US_PER_S, amount)
        for kind, start, duration, amount in iter_unpack(ENTRY.format, packed)
        if kind in _KINDS
    ]


def check_timeline(packed: bytes | None) -> None:
    """Raise RemoteProtocolError if the length is not that of whole entries."""
    if packed is not None and len(packed) % ENTRY.size:
        raise RemoteProtocolError(
            f"timeline: {len(packed)} bytes are not entries of {ENTRY.size} bytes"
        )


def _microseconds(seconds: float) -> int:
    return min(max(round(seconds * _US_PER_S), 0), _MAX_US)
