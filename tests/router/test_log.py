"""The one line of a request: sums of counts, the worst of the times, nothing that was not."""

from router.log import facts
from tests.router.ends import ended


def test_choices_add_up_and_the_worst_time_counts() -> None:
    ends = [
        ended(
            "stop", prompt_tokens=3, completion_tokens=5, kv_bytes=64, queue_s=0.25, ttft_s=1 / 3
        ),
        ended("length", prompt_tokens=3, completion_tokens=2, queue_s=0.5, num_attempts=3),
    ]
    assert facts(ends) == {
        "attempts": 3,
        "prompt_tokens": 6,
        "cached_tokens": 0,
        "completion_tokens": 7,
        "kv_bytes": 64,
        "kv_skipped_tokens": 0,
        "queue_s": 0.5,
        "ttft_s": 0.333333,
    }


def test_a_request_that_was_never_placed_has_no_times() -> None:
    assert facts([ended("overloaded", queue_s=None)]).keys().isdisjoint({"queue_s", "kv_s"})
