"""Ends of requests."""

from __future__ import annotations

from typing import Any

from router.core.request import RequestEnd


def ended(outcome: str, **changes: Any) -> RequestEnd:
    fields: dict[str, Any] = {
        "outcome": outcome,
        "code": None,
        "client": "",
        "prompt_tokens": 1,
        "cached_tokens": 0,
        "completion_tokens": 1,
        "kv_bytes": 0,
        "kv_skipped_tokens": 0,
        "kv_seconds": 0.0,
        "kv_transfer_seconds": 0.0,
        "queue_s": 0.0,
        "ttft_s": None,
        "decode_s": None,
        "total_s": 1.0,
        "num_attempts": 1,
    }
    return RequestEnd(**(fields | changes))
