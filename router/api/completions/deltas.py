"""Deltas: the text and tokens that one or several generated tokens add to a response."""

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
    """A token with its log-probabilities and where its text starts in the choice's text.

    A prompt's first token has no log-probabilities: nothing precedes it.
    """

    token_id: int
    logprobs: Logprobs | None
    text_offset: int


def scored_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], packed: bytes, echoed: str
) -> list[ScoredToken]:
    """Return the tokens of a prompt with their log-probabilities, and where `echoed` has them."""
    special, scores, offset = tokenizer.special_ids, list[ScoredToken](), 0
    feed = tokenizer.detokenizer(shown=special).feed
    for token_id, logprobs in zip(prompt, [None, *unpack_prompt_logprobs(packed)], strict=False):
        scores.append(ScoredToken(token_id, logprobs, min(offset, len(echoed))))
        text = feed(token_id)
        # One that the tokenizer has added is not in the text.
        if token_id not in special or echoed.startswith(text, offset):
            offset += len(text)
    return scores


class Delta(NamedTuple):
    """The content of one event: text, tokens if asked for, and in the last the finish reason.

    `parts` are what the text came to in a request with a reader, which may hold some back; else
    None, and the text is all content.
    """

    text: str
    token_ids: Sequence[int] = ()
    scores: Sequence[ScoredToken] = ()
    finish_reason: str | None = None
    parts: Sequence[Part] | None = None
    # Of the prompt, in the first piece, where they are asked for beside the answer.
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
    """Return the piece of a token that shows its text only: as most do, and most recur."""
    return Delta(text)


def joined(pieces: Iterable[Delta]) -> Delta:
    """Merge deltas of one choice into one."""
    texts: list[str] = []
    token_ids: list[int] = []
    scores: list[ScoredToken] = []
    prompt_scores: Sequence[ScoredToken] = ()
    found: list[Part] | None = None
    finish_reason = None
    for piece in pieces:
        texts.append(piece.text)
        token_ids += piece.token_ids
        scores += piece.scores
        prompt_scores = prompt_scores or piece.prompt_scores
        if piece.parts is not None:
            found = [*(found or ()), *piece.parts]
        finish_reason = piece.finish_reason
    return Delta(
        "".join(texts),
        token_ids,
        scores,
        finish_reason,
        None if found is None else parts.joined(found),
        prompt_scores,
    )
