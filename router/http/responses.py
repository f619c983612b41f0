"""The response bodies of the OpenAI API: usage, logprobs, completions, chat completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Struct

from router.http.completion import Choice, Completion, Piece, ScoredToken
from router.text.tokenizer import Tokenizer

# JSON has no infinity.
LEAST_LOGPROB: Final = -9999.0
# Tokens whose scores are encoded at a time: a millisecond or two.
_SLICE: Final = 64
# Of one token and its log-probability in an answer.
BYTES_PER_SCORE: Final = 32


class PromptDetails(Struct):
    cached_tokens: int


class KvTransfer(Struct):
    """What the transfer from prefill to decode cost.

    `seconds` is from the offer's acceptance to the last byte, `transfer_seconds` the part of it in
    which bytes were under way; `bytes` over the latter is the bandwidth.
    """

    bytes: int
    skipped_tokens: int
    seconds: float
    transfer_seconds: float


class UsageBody(Struct):
    """`usage`; `kv_transfer` is our addition, null where no KV was sent, and until it is known."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    kv_transfer: KvTransfer | None = None


def usage_body(choices: Sequence[Choice], num_choices: int) -> UsageBody:
    """Add up the choices; every prompt counts once, however many choices continue it."""
    firsts = choices[::num_choices]
    prompt_tokens = sum([len(choice.prompt) for choice in firsts])
    completion_tokens = sum([choice.num_tokens for choice in choices])
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptDetails(sum([choice.cached_tokens for choice in firsts])),
        kv_transfer=_kv_transfer(choices),
    )


def _kv_transfer(choices: Sequence[Choice]) -> KvTransfer | None:
    usages = [choice.usage for choice in choices if choice.usage is not None]
    num_bytes = sum([usage.kv_bytes for usage in usages])
    skipped_tokens = sum([usage.kv_skipped_tokens for usage in usages])
    if not num_bytes and not skipped_tokens:
        return None
    return KvTransfer(
        bytes=num_bytes,
        skipped_tokens=skipped_tokens,
        seconds=sum([usage.kv_seconds for usage in usages]),
        transfer_seconds=sum([usage.kv_transfer_seconds for usage in usages]),
    )


def completion_logprobs(tokenizer: Tokenizer, scores: Iterable[ScoredToken]) -> dict[str, Any]:
    """Return `logprobs` of a text completion."""
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
        top: dict[str, float] = {}
        for token_id, value in score.logprobs.top:
            # The likelier of two tokens that read the same, such as halves of characters.
            top.setdefault(_text(tokenizer, token_id), max(value, LEAST_LOGPROB))
        top.setdefault(text, logprob)
        body["token_logprobs"].append(logprob)
        body["top_logprobs"].append(top)
    return body


def chat_logprobs(tokenizer: Tokenizer, scores: Iterable[ScoredToken]) -> dict[str, Any]:
    """Return `logprobs` of a chat completion."""
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


@lru_cache(maxsize=1 << 16)
def _text(tokenizer: Tokenizer, token_id: int) -> str:
    # A long prompt's tokens and their alternatives are many, and mostly the same ones.
    return tokenizer.token_text(token_id)


@lru_cache(maxsize=1 << 16)
def _bytes(tokenizer: Tokenizer, token_id: int) -> tuple[int, ...]:
    return tuple(tokenizer.token_bytes(token_id))


def _encoded(
    render: Callable[[Tokenizer, Sequence[ScoredToken]], dict[str, Any]],
    choice: Choice,
    scores: Sequence[ScoredToken],
) -> dict[str, Any] | None:
    """Return the logprobs of a whole choice, each token's encoded already.

    There may be millions of numbers: given all of them at once, the encoder would hold the GIL for
    longer than others should wait.
    """
    if not choice.asked.has_logprobs:
        return None
    tokenizer = choice.asked.tokenizer
    body = render(tokenizer, ())
    for start in range(0, len(scores), _SLICE):
        for name, values in render(tokenizer, scores[start : start + _SLICE]).items():
            if values:
                body[name] += [msgspec.Raw(msgspec.json.encode(value)) for value in values]
    return body


def _logprob(score: ScoredToken) -> float:
    return max(score.logprobs.logprob, LEAST_LOGPROB) if score.logprobs else LEAST_LOGPROB


def whole(pieces: Iterable[Piece]) -> Piece:
    """Return the pieces of one choice as a single one."""
    texts: list[str] = []
    token_ids: list[int] = []
    scores: list[ScoredToken] = []
    finish_reason = None
    for piece in pieces:
        texts.append(piece.text)
        token_ids += piece.token_ids
        scores += piece.scores
        finish_reason = piece.finish_reason
    return Piece("".join(texts), token_ids, scores, finish_reason)


def text_choice(choice: Choice, piece: Piece) -> dict[str, Any]:
    """Return one entry of `choices` of a text completion."""
    body = {
        "index": choice.index,
        "text": choice.prefix + piece.text,
        "logprobs": _encoded(completion_logprobs, choice, piece.scores),
        "finish_reason": piece.finish_reason,
    }
    return body | _ids(choice, piece) if choice.asked.has_ids else body


def chat_choice(choice: Choice, piece: Piece) -> dict[str, Any]:
    """Return one entry of `choices` of a chat completion."""
    body = {
        "index": choice.index,
        "message": {"role": "assistant", "content": piece.text, "refusal": None},
        "logprobs": _encoded(chat_logprobs, choice, piece.scores),
        "finish_reason": piece.finish_reason,
    }
    return body | _ids(choice, piece) if choice.asked.has_ids else body


def _ids(choice: Choice, piece: Piece) -> dict[str, Any]:
    return {"token_ids": list(piece.token_ids), "prompt_token_ids": list(choice.prompt)}


def whole_body(
    completion: Completion, pieces: Sequence[Piece], head: Mapping[str, object]
) -> bytes:
    """Return the body of a response that is not streamed; `head` holds id, created and model."""
    asked, choices = completion.asked, completion.choices
    entry = chat_choice if asked.is_chat else text_choice
    body = {
        **head,
        "object": "chat.completion" if asked.is_chat else "text_completion",
        "choices": [entry(choice, piece) for choice, piece in zip(choices, pieces, strict=True)],
        "usage": usage_body(choices, asked.num_choices),
    }
    return msgspec.json.encode(body)


def size_of_scores(pieces: Iterable[Piece]) -> int:
    """About how many bytes the log-probabilities of an answer will have."""
    scored = [score.logprobs for piece in pieces for score in piece.scores if score.logprobs]
    return BYTES_PER_SCORE * sum([1 + len(each.top) for each in scored])
