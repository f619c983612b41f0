"""Explains why a prompt was cached as far as it was and no further.

`see` is called when a request is placed, because the caches change afterwards; `explain` once the
worker has said how many tokens it had cached.  What is said to a client depends on its own earlier
requests only: blocks beyond what it shares with those are not looked up.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from msgspec import Struct

from router.core.fleet import Fleet, Worker, WorkerState
from router.core.history.losses import Losses
from router.core.history.record import Cache, Holder, Loss, Match, Reason, Record, Seen
from router.core.state import Attempt
from wire.frames import Role
from wire.payloads import Tier

# A worker reports an eviction with its next heartbeat, hence within this many intervals.
REPORT_BEATS: Final = 2


def see(
    attempt: Attempt, match: Match | None, losses: Losses, fleet: Fleet, *, local_prefill: bool
) -> Seen:
    """Note what is known of the caches when an attempt is placed."""
    prefiller, size = attempt.prefiller, attempt.prefiller.detail.block_size
    hashes = attempt.state.hashes(size)
    usable = 0 if match is None else min(match.usable, attempt.seq_len - 1)
    reusable = usable // size * size
    expected = min(attempt.held.get(prefiller.identity, 0), reusable)
    is_short = expected < reusable
    holder = _holder(attempt, expected, reusable, fleet, local_prefill) if is_short else None
    return Seen(
        prefiller=prefiller,
        hashes=hashes,
        expected=expected,
        reusable=reusable,
        match=match,
        loss=losses.latest(hashes[expected // size]) if is_short else None,
        holder=holder,
    )


def _holder(
    attempt: Attempt, expected: int, reusable: int, fleet: Fleet, local_prefill: bool
) -> Holder | None:
    """Return the worker with most of the prompt, if it has more than the one that prefills it."""
    identity = max(attempt.held, key=lambda each: attempt.held[each], default=b"")
    worker, tokens = fleet.get(identity), min(attempt.held.get(identity, 0), reusable)
    if worker is None or tokens <= expected:
        return None
    return Holder(worker.name, tokens, _why_not(worker, attempt, local_prefill))


def _why_not(worker: Worker, attempt: Attempt, local_prefill: bool) -> str:
    """Return why a worker was not chosen for the prefill."""
    if worker.state is not WorkerState.READY:
        return worker.state.value
    if worker.identity in attempt.state.avoided:
        return "failed"
    if not (local_prefill or worker.can(Role.PREFILL)):
        return "role"
    return "cost" if worker in attempt.free else "full"


def explain(record: Record, fleet: Fleet, losses: Losses, caching: Container[bytes]) -> Cache:
    """Explain a request that has ended after its prompt was read.

    `caching` are the workers that have reported cached blocks.
    """
    seen, end = record.seen, record.end
    assert seen is not None and end is not None
    cached, match = end.cached_tokens, seen.match
    why = _why(record, seen, fleet, losses, caching)
    return Cache(
        reason=why.reason,
        prefill_worker=cached,
        decode_worker=end.kv_skipped_tokens,
        longest_match=0 if match is None else match.tokens,
        reusable=seen.reusable,
        diverged_at=_diverged_at(record, match),
        earlier=match.earlier.name if match is not None and match.tokens else None,
        worker=why.worker,
        because=why.because,
        at=why.at,
        tier=why.tier,
    )


class Why(Struct, frozen=True):
    """A reason, and the fields of `Cache` that go with it."""

    reason: Reason
    worker: str | None = None
    because: str | None = None
    at: float | None = None
    tier: Tier | None = None


def _diverged_at(record: Record, match: Match | None) -> int | None:
    if match is None or match.is_whole or not 0 < match.tokens < record.num_tokens:
        return None
    return match.tokens


def _why(
    record: Record, seen: Seen, fleet: Fleet, losses: Losses, caching: Container[bytes]
) -> Why:
    assert record.end is not None
    cached, size, match = record.end.cached_tokens, seen.prefiller.detail.block_size, seen.match
    most = (record.num_tokens - 1) // size * size
    if most == 0:
        return Why(Reason.SHORT)
    if cached >= most:
        return Why(Reason.HIT)
    if match is not None and cached < seen.reusable:
        if record.is_scored:
            return Why(Reason.PROMPT_LOGPROBS)
        if match.earlier.salt != record.salt:
            return Why(Reason.OTHER_SALT)
        if match.is_in_flight:
            return Why(Reason.IN_FLIGHT)
        return _missing(record, seen, match, fleet, losses, caching)
    if match is None or match.tokens < cached:
        return Why(Reason.NOT_REMEMBERED if cached else Reason.UNSEEN)
    if match.tokens == 0:
        return Why(Reason.UNSEEN)
    return Why(Reason.EXTENDED if match.is_whole else Reason.DIVERGED)


def _missing(
    record: Record,
    seen: Seen,
    match: Match,
    fleet: Fleet,
    losses: Losses,
    caching: Container[bytes],
) -> Why:
    """Say why blocks of an earlier prompt, which was read, are not at the worker."""
    assert record.end is not None
    cached = record.end.cached_tokens
    holders = [match.earlier.prefiller]
    if cached < seen.expected:
        holders.append(seen.prefiller.identity)
    if (off := _without_cache(holders, match, fleet, caching)) is not None:
        return Why(Reason.CACHE_OFF, off)
    if cached < seen.expected:  # the worker had lost more than it had reported
        loss = losses.latest(seen.hashes[cached // seen.prefiller.detail.block_size])
        if loss is None or not _is_recent(loss, record, fleet):
            return Why(Reason.EVICTED, seen.prefiller.name)
        return Why(Reason.EVICTED, seen.prefiller.name, at=loss.at, tier=loss.tier)
    holder, loss = seen.holder, seen.loss
    if holder is not None and holder.tokens > cached:
        # A decode worker that may not prefill is not the reason if another has lost the tokens.
        if holder.because != "role" or loss is None:
            return Why(Reason.ELSEWHERE, holder.worker, holder.because)
    if loss is None:
        return Why(Reason.NOT_KEPT)
    if loss.tier is not None:
        return Why(Reason.EVICTED, loss.worker, at=loss.at, tier=loss.tier)
    is_back = any(each.name == loss.worker for each in fleet if each.is_ready)
    reason = Reason.WORKER_RESTARTED if is_back else Reason.WORKER_LOST
    return Why(reason, loss.worker, at=loss.at)


def _without_cache(
    holders: Sequence[bytes], match: Match, fleet: Fleet, caching: Container[bytes]
) -> str | None:
    """Return which of the workers that should have the tokens seems to cache none at all.

    It never reported a cached block, not even in a heartbeat after the earlier request.
    """
    for identity in holders:
        worker = fleet.get(identity)
        if worker is None or identity in caching or match.ended_at is None:
            continue
        if worker.last_seen > match.ended_at:
            return worker.name
    return None


def _is_recent(loss: Loss, record: Record, fleet: Fleet) -> bool:
    """Whether an eviction was reported about when the request's prompt was read."""
    progress, slack_s = record.progress, REPORT_BEATS * fleet.heartbeat_s
    assert progress is not None and progress.first_at is not None
    return record.placed[-1].at <= loss.at <= progress.first_at + slack_s


def sentence(cache: Cache, num_tokens: int) -> str:
    """Say in a sentence why the cache had as many of the `num_tokens` prompt tokens as it had."""
    had = f"{cache.prefill_worker} of {num_tokens} tokens were cached"
    return f"{had}: {_SENTENCES[cache.reason]}".format(
        match=cache.longest_match,
        reusable=cache.reusable,
        worker=cache.worker,
        because=_BECAUSE.get(cache.because or "", cache.because),
        tier="" if cache.tier is None else f", from {_TIERS[cache.tier]}",
    )


_BECAUSE: Final = {
    "role": "prefill workers read prompts, and it only generates",
    "full": "it had no capacity",
    "cost": "a prefill elsewhere was expected to take less time",
    "failed": "an earlier attempt failed there",
    "draining": "it is draining",
    "suspect": "it was silent or stalled",
}
_TIERS: Final = {"kv_cache": "its KV cache", "host": "its host memory", "disk": "its disk"}
_SENTENCES: Final = {
    Reason.HIT: "all that a cache can have; the rest of the last block is always computed",
    Reason.SHORT: "the prompt is shorter than a block, and only whole blocks are cached",
    Reason.UNSEEN: "no remembered request of this client begins like it",
    Reason.EXTENDED: "it goes on where an earlier request ends, and the rest is new",
    Reason.DIVERGED: "after {match} tokens it differs from the nearest earlier request",
    Reason.NOT_REMEMBERED: "no request that this router process remembers begins like it",
    Reason.PROMPT_LOGPROBS: "prompt_logprobs needs every token to be computed",
    Reason.OTHER_SALT: "an earlier request has {match} tokens in common, with another cache_salt",
    Reason.IN_FLIGHT: "an earlier request with {match} tokens in common was still being read",
    Reason.CACHE_OFF: "{worker} keeps no prefixes (--no-prefix-cache)",
    Reason.EVICTED: "{worker} evicted the rest of the {reusable} in common with an earlier "
    "request{tier}",
    Reason.ELSEWHERE: "{worker} had more of it, but {because}",
    Reason.WORKER_LOST: "{worker}, which had more of it, is gone",
    Reason.WORKER_RESTARTED: "{worker}, which had more of it, was restarted",
    Reason.NOT_KEPT: "an earlier request has {match} tokens in common, and no worker reports them",
}
