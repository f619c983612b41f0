"""The figures and the trace in the log line of a request over HTTP or raw TCP, without text."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from router.core.request import RequestEnd


def new_traceparent() -> str:
    """Return a `traceparent` of W3C Trace Context that begins a sampled trace."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def facts(ends: Sequence[RequestEnd]) -> dict[str, int | float]:
    """Return the figures of one request, merged over its choices.

    Counts are summed.  For `attempts` and times (in seconds), the maximum is used.  Times that no
    choice has are omitted.
    """
    if not ends:
        return {}
    sums = {
        name: sum([getattr(end, name) for end in ends])
        for name in (
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "kv_bytes",
            "kv_skipped_tokens",
        )
    }
    times = {"kv_s": max([end.kv_seconds for end in ends]) or None}
    for name in ("queue_s", "ttft_s", "decode_s"):
        reached = [value for end in ends if (value := getattr(end, name)) is not None]
        times[name] = max(reached, default=None)
    attempts = max([end.num_attempts for end in ends])
    known = {name: round(value, 6) for name, value in times.items() if value is not None}
    return {"attempts": attempts, **sums, **known}
