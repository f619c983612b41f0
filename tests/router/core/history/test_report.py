"""The body of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.core.history.record import Cache, Ended, Placed, Reason, Record
from router.core.history.report import RequestReport, report
from router.core.request import Request
from tests.router.core import states
from wire.options import Options


class Halves:
    """An outline whose parts are the tokens before 100 and those from 100 on."""

    num_bytes = 8

    def part_after(self, token_ids: Sequence[int]) -> str:
        return "messages[1]" if token_ids[-1] >= 99 else "system"


def ended(diverged_at: int | None) -> Record:
    return Record(
        number=1,
        name="r",
        client="key-1",
        salt="secret",
        num_tokens=120,
        submitted_at=5.0,
        progress=None,
        traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
        placed=(Placed(b"prefill-0-1", b"decode-0-1", None, 5.5),),
        chain=b"".join(number.to_bytes(4, "little") for number in range(120)),
        end=Ended("stop", 48, 3, 640, 16, 0.5, 1.0, 2.0),
        cache=Cache(
            Reason.EVICTED, 48, 16, 110, 96, diverged_at, "r0", "prefill-0", None, 4.0, "disk"
        ),
    )


def only(record: Record) -> dict[str, Any]:
    found = report("r", [record], 1000.0, {7: "other"}.get)
    raw = msgspec.json.encode(found)
    assert msgspec.json.decode(raw, type=RequestReport) == found
    assert b"secret" not in raw
    [choice] = msgspec.to_builtins(found)["choices"]
    return choice  # type: ignore[no-any-return]


def test_an_ended_request() -> None:
    choice = only(ended(None))
    cache = choice.pop("cache")
    [attempt] = choice["attempts"]
    assert attempt.pop("timeline")["queue_s"] == 0.5
    assert choice == {
        "client": "key-1",
        "state": "ended",
        "outcome": "stop",
        "prompt_tokens": 120,
        "completion_tokens": 3,
        "kv_bytes": 640,
        "submitted_at": 1005.0,
        "queue_s": 0.5,
        "ttft_s": 1.0,
        "total_s": 2.0,
        "trace_id": "a" * 32,
        "attempts": [
            {"prefill": "prefill-0", "decode": "decode-0", "local": None, "placed_at": 1005.5}
        ],
    }
    assert isinstance(cache, dict)
    assert cache.pop("explanation").startswith("48 of 120 tokens were cached: prefill-0 evicted")
    assert cache == {
        "reason": "evicted",
        "prefill_worker_tokens": 48,
        "decode_worker_tokens": 16,
        "longest_match": 110,
        "reusable": 96,
        "earlier_id": "r0",
        "diverged_at": None,
        "part": None,
        "worker": "prefill-0",
        "because": None,
        "at": 1004.0,
        "tier": "disk",
    }


def test_the_part_of_the_first_token_that_differs() -> None:
    record = ended(110)
    for outline, chain, part in (
        (Halves(), record.chain, "messages[1]"),
        (None, record.chain, "prompt"),
        (None, None, None),
    ):
        record.outline, record.chain = outline, chain
        cache = only(record)["cache"]
        assert isinstance(cache, dict)
        assert (cache["diverged_at"], cache["part"]) == (110, part)


def test_an_open_request() -> None:
    state = states.state(Request((1, 2), Options(), 1))
    record = Record(1, "r", "", "", 2, 0.0, state)
    assert only(record)["state"] == "waiting"
    record.placed = (Placed(None, b"decode-0-1", "cost", 0.0),)
    state.generated += [5, 6, 7]
    choice = only(record)
    assert (choice["state"], choice["completion_tokens"], choice["cache"]) == ("running", 3, None)
