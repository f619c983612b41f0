"""The body of `GET /v1/requests/{id}`, from the records of a request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import Struct as Layout
from typing import Literal

from msgspec import Struct

from router.core.history.chains import TOKEN_BYTES
from router.core.history.misses import sentence
from router.core.history.record import Cache, Record
from router.core.history.timeline import AttemptTimeline, NameOf, timeline
from wire.payloads import Tier


class CacheReport(Struct):
    """The fields of `router.core.history.record.Cache`, and what they mean in words.

    `part` is the part of the prompt with the first differing token: ``system``, ``tools``,
    ``messages[3]``, ``generation_prompt``, ``template`` (text that the chat template adds before
    all messages), or ``prompt`` where there is only one; null if the router has dropped the tokens.
    """

    reason: str
    explanation: str
    prefill_worker_tokens: int
    decode_worker_tokens: int
    longest_match: int
    reusable: int
    earlier_id: str | None
    diverged_at: int | None
    part: str | None
    worker: str | None
    because: str | None
    at: float | None
    tier: Tier | None


class AttemptReport(Struct):
    """The workers of one attempt; `local` is as in `router.core.history.record.Placed`.

    `timeline` says where its time went, with times in seconds since the request was submitted.
    """

    prefill: str | None
    decode: str | None
    local: str | None
    placed_at: float
    timeline: AttemptTimeline


class ChoiceReport(Struct):
    """One choice of a request.  Times `…_at` are in seconds since 1970, those `…_s` durations.

    `cache` is null until the request has ended, and where its prompt was not read.
    """

    client: str
    state: Literal["waiting", "running", "ended"]
    outcome: str | None
    prompt_tokens: int
    completion_tokens: int
    kv_bytes: int
    submitted_at: float
    queue_s: float | None
    ttft_s: float | None
    total_s: float | None
    attempts: list[AttemptReport]
    cache: CacheReport | None
    trace_id: str | None = None


class RequestReport(Struct):
    """A request that the router remembers, with a report for each choice; no text, no tokens."""

    id: str
    choices: list[ChoiceReport]
    object: Literal["request"] = "request"


def report(name: str, records: Sequence[Record], epoch_s: float, name_of: NameOf) -> RequestReport:
    """Describe the records of one id; `epoch_s` is the Unix time at 0 of the core's clock."""
    return RequestReport(name, [_choice(record, epoch_s, name_of) for record in records])


def _choice(record: Record, epoch_s: float, name_of: NameOf) -> ChoiceReport:
    end, cache, progress = record.end, record.cache, record.progress
    generated = () if progress is None else progress.generated
    ends = [each.at if each.ended_at is None else each.ended_at for each in record.placed]
    waits = [*chain([record.submitted_at], ends)][: len(ends)]
    return ChoiceReport(
        client=record.client,
        state="ended" if end else "running" if record.placed else "waiting",
        outcome=None if end is None else end.outcome,
        prompt_tokens=record.num_tokens,
        completion_tokens=len(generated) if end is None else end.completion_tokens,
        kv_bytes=0 if end is None else end.kv_bytes,
        submitted_at=_unix(record.submitted_at, epoch_s),
        queue_s=None if end is None else _rounded(end.queue_s),
        ttft_s=None if end is None else _rounded(end.ttft_s),
        total_s=None if end is None else _rounded(end.total_s),
        attempts=[
            AttemptReport(
                worker_name(each.prefill),
                worker_name(each.decode),
                each.local,
                _unix(each.at, epoch_s),
                timeline(each, waiting_since, record.submitted_at, name_of),
            )
            for each, waiting_since in zip(record.placed, waits, strict=True)
        ],
        cache=None if cache is None else _cache(record, cache, epoch_s),
        trace_id=None if record.traceparent is None else record.traceparent.split("-")[1],
    )


def _cache(record: Record, cache: Cache, epoch_s: float) -> CacheReport:
    return CacheReport(
        reason=cache.reason.value,
        explanation=sentence(cache, record.num_tokens),
        prefill_worker_tokens=cache.prefill_worker,
        decode_worker_tokens=cache.decode_worker,
        longest_match=cache.longest_match,
        reusable=cache.reusable,
        earlier_id=cache.earlier,
        diverged_at=cache.diverged_at,
        part=None if cache.diverged_at is None else _part(record, cache.diverged_at),
        worker=cache.worker,
        because=cache.because,
        at=None if cache.at is None else _unix(cache.at, epoch_s),
        tier=cache.tier,
    )


def _part(record: Record, position: int) -> str | None:
    outline, chain = record.outline, record.chain
    if chain is None:
        return None
    if outline is None:
        return "prompt"
    before = Layout(f"<{position}I").unpack(chain[: position * TOKEN_BYTES])
    return outline.part_after(before)


def _rounded(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s, 6)


def _unix(at: float, epoch_s: float) -> float:
    return round(epoch_s + at, 3)


def worker_name(identity: bytes | None) -> str | None:
    """Return the role and rank of a worker, without its epoch."""
    return None if identity is None else identity.decode("ascii").rpartition("-")[0]
