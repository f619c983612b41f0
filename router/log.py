"""The log line of a request, the same over HTTP and raw TCP.

An HTTP request may have several choices, each of which is a request of its own inside the router; a
raw TCP request is one.  No prompt and no text is in the log.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.request import RequestEnd


def facts(ends: Sequence[RequestEnd]) -> dict[str, int | float]:
    """Return the figures of requests that belong together, from how they ended.

    Counts are summed up; of `attempts` and of the times, in seconds, the largest counts.  A time
    that no request got as far as is left out.
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
