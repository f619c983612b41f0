"""Usage of a completion."""

from __future__ import annotations

from router.api.chat import ChatAnswer
from router.api.completions.completion import Choice, CompletionRequest
from router.api.completions.usage import KvTransfer, running_usage, usage_body
from router.text.tokenizer import Tokenizer
from tests.router.site import LETTERS
from wire.payloads import Usage


def transfer(subject: Choice) -> KvTransfer | None:
    usage = usage_body([subject], 1, has_baton=True)
    assert usage.baton is not None
    return usage.baton.kv_transfer


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
