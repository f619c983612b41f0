"""Response bodies: logprobs, usage, whole choices."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from router.http.completion import Choice, CompletionRequest, Piece, ScoredToken
from router.http.responses import (
    LEAST_LOGPROB,
    chat_choice,
    chat_logprobs,
    completion_logprobs,
    text_choice,
    usage_body,
    whole,
)
from router.text.tokenizer import Tokenizer
from tests.router.site import LETTERS, ids
from wire.payloads import Logprobs, Usage

TOKENIZER = Tokenizer(LETTERS)
[A], [B] = ids("a"), ids("b")
SCORES = [
    ScoredToken(A, Logprobs(logprob=-0.1, top=((A, -0.1), (B, -2.0))), 0),
    ScoredToken(B, Logprobs(logprob=-math.inf), 1),
]


def choice(**asked: Any) -> Choice:
    return Choice(
        1, (5, 6), CompletionRequest(tokenizer=TOKENIZER, **asked), lambda choice: None, prefix="<"
    )


def test_completion_logprobs() -> None:
    assert completion_logprobs(TOKENIZER, SCORES) == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.1, LEAST_LOGPROB],
        "top_logprobs": [{"a": -0.1, "b": -2.0}, {"b": LEAST_LOGPROB}],
        "text_offset": [0, 1],
    }


def test_a_prompts_first_token_has_no_logprob() -> None:
    logprobs = completion_logprobs(TOKENIZER, [ScoredToken(A, None, 0), SCORES[1]])
    assert logprobs["token_logprobs"] == [None, LEAST_LOGPROB]
    assert logprobs["top_logprobs"] == [None, {"b": LEAST_LOGPROB}]


def test_the_likelier_of_two_tokens_that_read_alike() -> None:
    first, second = ids("é")
    score = ScoredToken(first, Logprobs(logprob=-1.0, top=((first, -1.0), (second, -3.0))), 0)
    assert completion_logprobs(TOKENIZER, [score])["top_logprobs"] == [{"\ufffd": -1.0}]


def test_chat_logprobs() -> None:
    content = chat_logprobs(TOKENIZER, SCORES)["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]
    assert content[0]["bytes"] == [97]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "b"]
    assert content[1]["logprob"] == LEAST_LOGPROB


def test_a_token_without_scores_is_the_least_likely() -> None:
    assert chat_logprobs(TOKENIZER, [ScoredToken(A, None, 0)])["content"][0]["logprob"] < -9000


def test_pieces_become_one() -> None:
    pieces = [Piece("a", [A], SCORES[:1]), Piece("b", [B], SCORES[1:], "stop")]
    assert whole(pieces) == Piece("ab", [A, B], SCORES, "stop")


def test_a_text_choice_echoes_and_names_tokens_when_asked() -> None:
    body = text_choice(choice(has_ids=True), Piece("ab", [A, B], (), "stop"))
    assert body["text"] == "<ab"
    assert (body["token_ids"], body["prompt_token_ids"]) == ([A, B], [5, 6])
    assert "token_ids" not in text_choice(choice(), Piece("ab", [A, B], (), "stop"))


def test_a_chat_choice() -> None:
    body = chat_choice(choice(has_logprobs=True), Piece("ab", [A, B], SCORES, "length"))
    assert body["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert (body["index"], body["finish_reason"]) == (1, "length")
    assert len(body["logprobs"]["content"]) == 2


@pytest.mark.parametrize("number", [0, 1, 64, 130])
def test_the_scores_of_many_tokens_are_those_of_each(number: int) -> None:
    """They are encoded in slices; the answer is the same."""
    piece = Piece("a", (), SCORES * number, "length")
    subject = choice(has_logprobs=True)
    for entry, render in ((text_choice, completion_logprobs), (chat_choice, chat_logprobs)):
        answer = json.loads(msgspec.json.encode(entry(subject, piece)))
        assert answer["logprobs"] == render(TOKENIZER, piece.scores)


def test_kv_transfer_is_null_until_something_was_handed_over() -> None:
    subject = choice()
    assert usage_body([subject], 1).kv_transfer is None
    subject.usage = Usage(finish_reason="stop")
    assert usage_body([subject], 1).kv_transfer is None
    subject.usage = Usage(finish_reason="stop", kv_skipped_tokens=3, kv_transfer_seconds=0.25)
    transfer = usage_body([subject], 1).kv_transfer
    assert transfer is not None
    assert (transfer.bytes, transfer.skipped_tokens, transfer.transfer_seconds) == (0, 3, 0.25)
