"""Log-probabilities as completions and chats show them."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from router.api.chat import ChatAnswer
from router.api.completions.completion import Choice, CompletionRequest
from router.api.completions.deltas import Delta, ScoredToken
from router.api.completions.logprobs import (
    BYTES_PER_SCORE,
    LEAST_LOGPROB,
    chat_logprobs,
    completion_logprobs,
    encoded,
    prompt_logprobs,
    size_of_scores,
)
from router.text.tokenizer import Tokenizer
from tests.router.site import LETTERS, ids
from wire.payloads import Logprobs

TOKENIZER = Tokenizer(LETTERS)
[A], [B] = ids("a"), ids("b")
SCORES = [
    ScoredToken(A, Logprobs(logprob=-0.1, top=((A, -0.1), (B, -2.0))), 0),
    ScoredToken(B, Logprobs(logprob=-math.inf), 1),
]


def test_completion_logprobs() -> None:
    assert completion_logprobs(TOKENIZER, SCORES) == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.1, LEAST_LOGPROB],
        "top_logprobs": [{"a": -0.1, "b": -2.0}, {"b": LEAST_LOGPROB}],
        "text_offset": [0, 1],
    }


def test_the_token_itself_is_the_first_of_the_likeliest() -> None:
    drawn = ScoredToken(B, Logprobs(logprob=-2.0, top=((A, -0.1), (B, -2.0))), 0)
    [top] = completion_logprobs(TOKENIZER, [drawn])["top_logprobs"]
    assert list(top.items()) == [("b", -2.0), ("a", -0.1)]


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
    never = ScoredToken(A, Logprobs(logprob=-0.1, top=((A, -0.1), (B, -math.inf))), 0)
    [entry] = chat_logprobs(TOKENIZER, [never])["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.1, LEAST_LOGPROB]


def test_a_token_without_scores_is_the_least_likely() -> None:
    assert chat_logprobs(TOKENIZER, [ScoredToken(A, None, 0)])["content"][0]["logprob"] < -9000


@pytest.mark.parametrize("number", [0, 1, 64, 130])
@pytest.mark.parametrize("render", [completion_logprobs, chat_logprobs])
def test_the_scores_of_many_tokens_are_those_of_each(render: Any, number: int) -> None:
    """They are encoded in slices; the answer is the same."""
    asked = CompletionRequest(tokenizer=TOKENIZER, answer=ChatAnswer, has_logprobs=True)
    subject = Choice(0, (5, 6), asked, lambda choice: None)
    scores = SCORES * number
    answer = json.loads(msgspec.json.encode(encoded(render, subject, scores)))
    assert answer == render(TOKENIZER, scores)


def test_tokens_may_be_named_by_their_ids() -> None:
    asked = CompletionRequest(
        tokenizer=TOKENIZER, answer=ChatAnswer, has_logprobs=True, has_ids_as_names=True
    )
    subject = Choice(0, (5,), asked, lambda choice: None)
    text = encoded(completion_logprobs, subject, SCORES)
    assert json.loads(msgspec.json.encode(text))["tokens"] == [f"token_id:{A}", f"token_id:{B}"]
    chat = encoded(chat_logprobs, subject, SCORES[:1])
    [entry] = json.loads(msgspec.json.encode(chat))["content"]
    assert entry["token"] == f"token_id:{A}"
    assert [top["token"] for top in entry["top_logprobs"]] == [f"token_id:{A}", f"token_id:{B}"]


def test_prompt_logprobs_are_by_id_and_ranked() -> None:
    asked = CompletionRequest(tokenizer=TOKENIZER, answer=ChatAnswer, has_prompt_logprobs=True)
    subject = Choice(0, (A, A, B), asked, lambda choice: None)
    seldom = ScoredToken(B, Logprobs(logprob=-math.inf, top=((A, -0.5),)), 2)
    piece = Delta("", prompt_scores=[ScoredToken(A, None, 0), SCORES[0], seldom])
    said = json.loads(msgspec.json.encode(prompt_logprobs(subject, piece)))
    a = {"logprob": -0.1, "rank": 1, "decoded_token": "a"}
    b = {"logprob": -2.0, "rank": 2, "decoded_token": "b"}
    assert said["prompt_logprobs"][:2] == [None, {str(A): a, str(B): b}]
    assert said["prompt_logprobs"][2] == {
        str(B): {"logprob": LEAST_LOGPROB, "rank": None, "decoded_token": "b"},
        str(A): a | {"logprob": -0.5},
    }
    plain = CompletionRequest(tokenizer=TOKENIZER, answer=ChatAnswer)
    assert prompt_logprobs(Choice(0, (A,), plain, lambda choice: None), piece) == {
        "prompt_logprobs": None
    }
    # Two with two and one others, and of the text one with none.
    assert size_of_scores([piece, Delta("b", scores=[SCORES[1]])]) == 6 * BYTES_PER_SCORE
