"""Usage of a completion."""

from __future__ import annotations

from router.api.chat import ChatAnswer
from router.api.completions.completion import Choice, CompletionRequest
from router.api.completions.usage import CacheUsage, KvTransfer, running_usage, usage_body
from router.core.history.record import Cache, Placed, Reason, Record
from router.text.tokenizer import Tokenizer
from tests.router.ends import ended
from tests.router.site import LETTERS
from wire.payloads import Usage


def transfer(subject: Choice) -> KvTransfer | None:
    usage = usage_body([subject], 1, has_baton=True)
    assert usage.baton is not None
    return usage.baton.kv_transfer


def test_the_cache_of_several_prompts() -> None:
    asked = CompletionRequest(tokenizer=Tokenizer(LETTERS), answer=ChatAnswer, num_choices=2)
    choices = [Choice(i, (5, 6), asked, lambda choice: None) for i in range(6)]
    for number, cache in enumerate(
        [
            Cache(Reason.EXTENDED, 48, 16, 60, 48),
            Cache(Reason.HIT, 48, 48, 60, 48),
            Cache(Reason.EVICTED, 16, 0, 59, 48),
            Cache(Reason.HIT, 48, 48, 60, 48),
        ]
    ):
        record = Record(number, "r", "", "", 60, 0.0, None, cache=cache)
        record.placed = (Placed(b"prefill-0-1", b"decode-0-1", None, 1.0),)
        choices[number].end = ended("stop", record=record)
    choices[4].end = ended("stop")  # the router remembers nothing of it
    usage = usage_body(choices, 2, has_baton=True)
    assert usage.baton is not None
    assert usage.baton.cache == CacheUsage(64, 16, 59, "evicted", None)
    usage = usage_body(choices[4:], 2, has_baton=True)
    assert usage.baton is not None and usage.baton.cache is None


def test_kv_transfer_is_null_until_something_was_handed_over() -> None:
    asked = CompletionRequest(tokenizer=Tokenizer(LETTERS), answer=ChatAnswer)
    subject = Choice(0, (5, 6), asked, lambda choice: None)
    running = running_usage(subject, 5)
    assert (running.prompt_tokens, running.completion_tokens, running.total_tokens) == (2, 5, 7)
    assert transfer(subject) is None
    subject.usage = Usage(finish_reason="stop")
    assert transfer(subject) is None
    subject.usage = Usage(finish_reason="stop", kv_skipped_tokens=3, kv_transfer_seconds=0.25)
    said = transfer(subject)
    assert said is not None
    assert (said.bytes, said.skipped_tokens, said.transfer_seconds) == (0, 3, 0.25)
