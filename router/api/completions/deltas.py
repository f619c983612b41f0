"""Deltas: the text, token ids and log-probabilities that tokens add to a response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from router.text import output_parts as parts
from router.text.output_parts import Content, Part
from router.text.tokenizer import Tokenizer
from wire.logprobs import unpack_prompt_logprobs
from wire.payloads import Logprobs


class ScoredToken(NamedTuple):
    """A token, its log-probabilities, and the offset of its text in the choice's text.

    A prompt's first token has no log-probabilities.
    """

    token_id: int
    logprobs: Logprobs | None
    text_offset: int


def scored_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], packed: bytes, echoed: str
) -> list[ScoredToken]:
    """Return a prompt's tokens with log-probabilities and their offsets in the `echoed` text."""
    special, scores, offset = tokenizer.special_ids, list[ScoredToken](), 0
    feed = tokenizer.detokenizer(shown=special).feed
    for token_id, logprobs in zip(prompt, [None, *unpack_prompt_logprobs(packed)], strict=False):
        scores.append(ScoredToken(token_id, logprobs, min(offset, len(echoed))))
        text = feed(token_id)
        # A special token that the tokenizer added is not part of the echoed text.
        if token_id not in special or echoed.startswith(text, offset):
            offset += len(text)
    return scores


class Delta(NamedTuple):
    """The content of one event; the last one of a choice has the finish reason.

    `parts` is the output of the request's reader, which may buffer some text; it is None if there
    is no reader, and then all text is content.
    """

    text: str
    token_ids: Sequence[int] = ()
    scores: Sequence[ScoredToken] = ()
    finish_reason: str | None = None
    parts: Sequence[Part] | None = None
    # The prompt's tokens, only in the first delta of a request with `prompt_logprobs`.
    prompt_scores: Sequence[ScoredToken] = ()

    @property
    def content(self) -> str | None:
        """The text if the delta is only content, else None."""
        if self.parts is None:
            return self.text
        if all(isinstance(part, Content) for part in self.parts):
            return "".join([part.text for part in self.parts if isinstance(part, Content)])
        return None


@lru_cache(maxsize=1 << 16)
def plain(text: str) -> Delta:
    """Return a delta that has only text; most deltas do and recur, so they are cached."""
    return Delta(text)


def joined(deltas: Iterable[Delta]) -> Delta:
    """Merge deltas of one choice into one."""
    texts: list[str] = []
    token_ids: list[int] = []
    scores: list[ScoredToken] = []
    prompt_scores: Sequence[ScoredToken] = ()
    found: list[Part] | None = None
    finish_reason = None
    for delta in deltas:
        texts.append(delta.text)
        token_ids += delta.token_ids
        scores += delta.scores
        prompt_scores = prompt_scores or delta.prompt_scores
        if delta.parts is not None:
            found = [*(found or ()), *delta.parts]
        finish_reason = delta.finish_reason
    return Delta(
        "".join(texts),
        token_ids,
        scores,
        finish_reason,
        None if found is None else parts.joined(found),
        prompt_scores,
    )
