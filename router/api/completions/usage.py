"""The `usage` object of a completion, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from router.api.completions.completion import Choice


class PromptDetails(Struct):
    cached_tokens: int


class KvTransfer(Struct):
    """The cost of the KV transfer from the prefill to the decode worker.

    `seconds` is the time from the acceptance of the offer to the last byte, and `transfer_seconds`
    the part of it in which bytes were in flight: `bytes / transfer_seconds` is the bandwidth.
    """

    bytes: int
    skipped_tokens: int
    seconds: float
    transfer_seconds: float


class CacheUsage(Struct):
    """How many tokens of the prompts were cached, and the reason why not more were.

    `local_prefill` is why one worker did the prefill and the decode; null if two did.  Where there
    are several prompts, `longest_match`, `reason` and `local_prefill` are those of the one with the
    most tokens that were not cached.  GET /v1/requests/ID explains each.
    """

    prefill_worker_tokens: int
    decode_worker_tokens: int
    longest_match: int
    reason: str
    local_prefill: str | None


class BatonUsage(Struct):
    """Usage that only Baton reports.

    `kv_transfer` is null if no KV was sent or not yet known, `cache` if the router remembers no
    requests or nothing was read.
    """

    kv_transfer: KvTransfer | None
    cache: CacheUsage | None


class UsageBody(Struct, omit_defaults=True):
    """The `usage` object; `baton` is an extension for requests with `baton_usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    baton: BatonUsage | None = None


def usage_body(
    choices: Sequence[Choice], num_choices: int, *, has_baton: bool = False
) -> UsageBody:
    """Sum the usage of all choices; the `num_choices` choices of a prompt count it once."""
    firsts = choices[::num_choices]
    return _usage(
        sum([len(choice.prompt) for choice in firsts]),
        sum([choice.num_tokens for choice in choices]),
        sum([choice.cached_tokens for choice in firsts]),
        BatonUsage(_kv_transfer(choices), _cache(firsts)) if has_baton else None,
    )


def running_usage(choice: Choice, num_tokens: int) -> UsageBody:
    """Return the usage of one choice after `num_tokens` tokens."""
    return _usage(len(choice.prompt), num_tokens, choice.cached_tokens)


def _usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, baton: BatonUsage | None = None
) -> UsageBody:
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens),
        baton=baton,
    )


def _kv_transfer(choices: Sequence[Choice]) -> KvTransfer | None:
    usages = [choice.usage for choice in choices if choice.usage is not None]
    num_bytes = sum([usage.kv_bytes for usage in usages])
    skipped_tokens = sum([usage.kv_skipped_tokens for usage in usages])
    if not num_bytes and not skipped_tokens:
        return None
    return KvTransfer(
        bytes=num_bytes,
        skipped_tokens=skipped_tokens,
        seconds=sum([usage.kv_seconds for usage in usages]),
        transfer_seconds=sum([usage.kv_transfer_seconds for usage in usages]),
    )


def _cache(choices: Sequence[Choice]) -> CacheUsage | None:
    records = [choice.end.record for choice in choices if choice.end is not None]
    known = [(it, it.cache) for it in records if it is not None and it.cache is not None]
    if not known:
        return None
    record, worst = max(known, key=lambda each: each[0].num_tokens - each[1].prefill_worker)
    return CacheUsage(
        prefill_worker_tokens=sum([cache.prefill_worker for _, cache in known]),
        decode_worker_tokens=sum([cache.decode_worker for _, cache in known]),
        longest_match=worst.longest_match,
        reason=worst.reason.value,
        local_prefill=record.placed[-1].local,
    )
