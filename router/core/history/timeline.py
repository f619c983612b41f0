"""Where the time of a request went: its attempts, and in each the parts that its workers reported.

Workers report their own times (`wire.timeline`).  The router knows when it sent a request and when
the report came, so it places the report in the middle between the two, as NTP does, and cuts what
lies outside: a worker with a wrong clock cannot move anything out of its attempt.  All `at_s` are
seconds since the request was submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from router.core.history.record import Placed
from wire.timeline import Entry, Kind, unpack_timeline

# Returns the id of the request that an attempt belongs to, if it may be shown.
NameOf = Callable[[int], str | None]


class ChunkReport(Struct):
    """A step that computed some tokens of the prompt."""

    at_s: float
    duration_s: float
    tokens: int


class PrefillReport(Struct):
    """The prefill, `queue_s` after the worker had the request; `chunks` are its first 32."""

    at_s: float
    duration_s: float
    queue_s: float
    num_chunks: int
    chunks: list[ChunkReport]


class SegmentReport(Struct):
    """A segment of KV, from its admission until it is stored in blocks."""

    at_s: float
    duration_s: float
    bytes: int


class TransferReport(Struct):
    """The KV transfer at the decode worker; `segments` are its first 64."""

    at_s: float
    duration_s: float
    bytes: int
    num_segments: int
    segments: list[SegmentReport]


class StallReport(Struct):
    """A step that took over four times the median; it computed `prompt_tokens` of prompts too."""

    at_s: float
    duration_s: float
    prompt_tokens: int


class DecodeReport(Struct):
    """The steps that generated tokens after the first; times of steps are of the last 4096."""

    at_s: float
    duration_s: float
    num_steps: int
    step_p50_s: float
    step_p99_s: float
    step_max_s: float
    stalls: list[StallReport]


class PreemptionReport(Struct):
    """A time without blocks, which the request with the id `by` got.

    `by` is null if that is another client's request, or not remembered.
    """

    at_s: float
    duration_s: float
    by: str | None


class AttemptTimeline(Struct):
    """One attempt: it waited `queue_s` for workers, and began when it was sent to them.

    `outcome` is a finish reason or an error code, and `failed` the worker that failed; all are null
    while the attempt runs.  `first_token_s` is when the router had the token of the prefill.
    """

    queue_s: float
    at_s: float
    duration_s: float | None
    outcome: str | None
    failed: str | None
    first_token_s: float | None
    prefill: PrefillReport | None
    transfer: TransferReport | None
    decode: DecodeReport | None
    preemptions: list[PreemptionReport]


def timeline(placed: Placed, waiting_since: float, zero: float, name_of: NameOf) -> AttemptTimeline:
    """Describe an attempt; `zero` is when its request was submitted."""
    read = [*_placed(placed.prefill_timeline, placed.at, placed.at, placed.read_at)]
    asked_at = placed.at if placed.asked_at is None else placed.asked_at
    decoded = [*_placed(placed.decode_timeline, placed.at, asked_at, placed.ended_at)]
    entries = [it._replace(start_s=it.start_s - zero) for it in (*read, *decoded)]
    of_kind = {kind: [it for it in entries if it.kind is kind] for kind in Kind}
    end, first = placed.ended_at, placed.read_at
    return AttemptTimeline(
        queue_s=_rounded(placed.at - waiting_since),
        at_s=_rounded(placed.at - zero),
        duration_s=None if end is None else _rounded(end - placed.at),
        outcome=placed.outcome,
        failed=placed.failed,
        first_token_s=None if first is None else _rounded(first - zero),
        prefill=_prefill(of_kind),
        transfer=_transfer(of_kind, placed.kv_bytes),
        decode=_decode(of_kind),
        preemptions=[
            PreemptionReport(*_times(it), name_of(it.amount)) for it in of_kind[Kind.PREEMPTION]
        ],
    )


def _placed(packed: bytes, begin: float, asked_at: float, came_at: float | None) -> Iterator[Entry]:
    """Yield entries on the core's clock, within the time from `begin` to `came_at`.

    The worker was asked at `asked_at`, and its timeline came at `came_at`.
    """
    if came_at is None:
        return
    entries = unpack_timeline(packed)
    requests = [it for it in entries if it.kind is Kind.REQUEST]
    request = requests[0] if requests else Entry(Kind.REQUEST, 0.0, 0.0)
    latest = came_at - request.start_s - request.duration_s
    earliest = min(asked_at - request.start_s, latest)
    offset = (earliest + latest) / 2
    for entry in entries:
        start = min(max(offset + entry.start_s, begin), came_at)
        end = min(max(offset + entry.start_s + entry.duration_s, start), came_at)
        yield Entry(entry.kind, start, end - start, entry.amount)


def _prefill(of_kind: dict[Kind, list[Entry]]) -> PrefillReport | None:
    for whole in of_kind[Kind.PREFILL]:
        begun = min([it.start_s for it in of_kind[Kind.REQUEST]], default=whole.start_s)
        waited_s = max(0.0, whole.start_s - begun)
        chunks = [ChunkReport(*_times(it), it.amount) for it in of_kind[Kind.CHUNK]]
        return PrefillReport(*_times(whole), _rounded(waited_s), whole.amount, chunks)
    return None


def _transfer(of_kind: dict[Kind, list[Entry]], num_bytes: int) -> TransferReport | None:
    for whole in of_kind[Kind.TRANSFER]:
        segments = [SegmentReport(*_times(it), it.amount) for it in of_kind[Kind.SEGMENT]]
        return TransferReport(*_times(whole), num_bytes, whole.amount, segments)
    return None


def _decode(of_kind: dict[Kind, list[Entry]]) -> DecodeReport | None:
    for whole in of_kind[Kind.DECODE]:
        steps = (of_kind[kind] for kind in (Kind.STEP_P50, Kind.STEP_P99, Kind.STEP_MAX))
        p50, p99, longest = (_rounded(it[0].duration_s) if it else 0.0 for it in steps)
        stalls = [StallReport(*_times(it), it.amount) for it in of_kind[Kind.STALL]]
        return DecodeReport(*_times(whole), whole.amount, p50, p99, longest, stalls)
    return None


def _times(entry: Entry) -> tuple[float, float]:
    return _rounded(entry.start_s), _rounded(entry.duration_s)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
