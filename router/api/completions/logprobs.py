"""Log-probabilities of tokens, in the formats of text and chat completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from router.api.completions.completion import Choice
from router.api.completions.deltas import Delta, ScoredToken
from router.text.tokenizer import Tokenizer

# Stands for minus infinity, which JSON does not have.
LEAST_LOGPROB: Final = -9999.0
# How many tokens are encoded at a time: a millisecond or two of work.
_SLICE: Final = 64
# Approximate size of one token and its log-probability in a response.
BYTES_PER_SCORE: Final = 32

Render = Callable[[Tokenizer, Sequence[ScoredToken]], dict[str, Any]]


def completion_logprobs(tokenizer: Tokenizer, scores: Iterable[ScoredToken]) -> dict[str, Any]:
    """Return the `logprobs` object of a text completion."""
    body: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for score in scores:
        text = _text(tokenizer, score.token_id)
        body["tokens"].append(text)
        body["text_offset"].append(score.text_offset)
        if score.logprobs is None:
            body["token_logprobs"].append(None)
            body["top_logprobs"].append(None)
            continue
        logprob = _logprob(score)
        top = {text: logprob}
        for token_id, value in score.logprobs.top:
            # If two tokens have the same text (parts of characters), keep the likelier one.
            top.setdefault(_text(tokenizer, token_id), max(value, LEAST_LOGPROB))
        body["token_logprobs"].append(logprob)
        body["top_logprobs"].append(top)
    return body


def chat_logprobs(tokenizer: Tokenizer, scores: Iterable[ScoredToken]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat completion."""
    content = []
    for score in scores:
        top = score.logprobs.top if score.logprobs else ()
        entry = _chat_token(tokenizer, score.token_id, _logprob(score))
        entry["top_logprobs"] = [_chat_token(tokenizer, *each) for each in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": _text(tokenizer, token_id),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(_bytes(tokenizer, token_id)),
    }


def prompt_logprobs(choice: Choice, delta: Delta) -> dict[str, Any]:
    """Return vLLM's `prompt_logprobs`: an entry for each prompt token, or null if not requested.

    An entry has the token itself, then the likeliest tokens; an unknown `rank` is null.
    """
    if not choice.request.has_prompt_logprobs:
        return {"prompt_logprobs": None}
    tokenizer, entries = choice.request.names, list[msgspec.Raw]()
    for score in delta.prompt_scores:
        ranked: dict[str, dict[str, Any]] = {}
        if score.logprobs is not None:
            own = (score.token_id, score.logprobs.logprob)
            ranks = {token_id: rank for rank, (token_id, _) in enumerate(score.logprobs.top, 1)}
            for token_id, logprob in (own, *score.logprobs.top):
                ranked[str(token_id)] = {
                    "logprob": max(logprob, LEAST_LOGPROB),
                    "rank": ranks.get(token_id),
                    "decoded_token": _text(tokenizer, token_id),
                }
        entries.append(msgspec.Raw(msgspec.json.encode(ranked or None)))
    return {"prompt_logprobs": entries}


def encoded(render: Render, choice: Choice, scores: Sequence[ScoredToken]) -> dict[str, Any] | None:
    """Return the logprobs of a choice, encoded in slices so that other threads can run."""
    if not choice.request.has_logprobs:
        return None
    body = render(choice.request.names, ())
    for start in range(0, len(scores), _SLICE):
        for name, values in render(choice.request.names, scores[start : start + _SLICE]).items():
            if values:
                body[name] += [msgspec.Raw(msgspec.json.encode(value)) for value in values]
    return body


def size_of_scores(deltas: Iterable[Delta]) -> int:
    """Estimate the size in bytes of the log-probabilities of a response."""
    scored = [
        score.logprobs
        for delta in deltas
        for score in (*delta.scores, *delta.prompt_scores)
        if score.logprobs
    ]
    return BYTES_PER_SCORE * sum([1 + len(each.top) for each in scored])


@lru_cache(maxsize=1 << 16)
def _text(tokenizer: Tokenizer, token_id: int) -> str:
    # Cached: a long prompt has many tokens and alternatives, mostly the same ones.
    return tokenizer.token_text(token_id)


@lru_cache(maxsize=1 << 16)
def _bytes(tokenizer: Tokenizer, token_id: int) -> tuple[int, ...]:
    return tuple(tokenizer.token_bytes(token_id))


def _logprob(score: ScoredToken) -> float:
    return max(score.logprobs.logprob, LEAST_LOGPROB) if score.logprobs else LEAST_LOGPROB
