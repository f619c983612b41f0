"""Speculative decoding: draft the next tokens cheaply, verify all drafts in one forward.

In the notation of Leviathan et al. 2023: drafts x_1 ... x_K are drawn from p, and y_i from the
target's distribution q_i after x_1 ... x_i.  The rule is

    accept x_i with probability min(1, q(x_i) / p(x_i)), else draw from norm(max(0, q - p))

Here p is a point mass at x_i, so the rule becomes: draw y ~ q and accept x_i if y = x_i.  Sampling
the target as usual therefore verifies the draft, and because the random numbers are a function of
(seed, choice, position), the text is the same as without speculation, token for token.

The KV of a rejected draft lies after the computed tokens, where nothing reads it, and the next step
overwrites it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Many
from typing import Protocol

from worker.engine.sequence import MAX_DRAFTS, Sequence
from worker.executor.contract import ModelInfo, SampledToken


class Drafter(Protocol):
    """Drafts the next tokens of sequences.  Wrong drafts cost time but do not change the text.

    Drafted ids are below `vocab_size`; None for a drafter that only repeats tokens of the text.
    """

    vocab_size: int | None

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        """Return at most `limits[i]` likely next tokens of each sequence."""

    def forget(self, request_id: int) -> None:
        """Drop the data of a sequence that has ended; ignore an unknown id."""


class NgramDrafter:
    """Prompt lookup: drafts the tokens that followed an earlier occurrence of the last n-gram."""

    vocab_size: int | None = None

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = checked(num_drafts)
        self._indexes = defaultdict[int, _NgramIndex](_NgramIndex)

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        most = self.num_drafts
        return [
            self._indexes[sequence.request_id].find(
                sequence.token_ids, limit if limit < most else most
            )
            for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def forget(self, request_id: int) -> None:
        self._indexes.pop(request_id, None)


class _NgramIndex:
    """The position after the last occurrence of each bigram and trigram of a growing text.

    While the text repeats an earlier passage, the index is neither searched nor extended.
    """

    __slots__ = ("_after", "_num_seen", "_start")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._num_seen = 2
        self._start = 0  # the position of the next repeated token; 0 for none

    def find(self, token_ids: list[int], limit: int) -> list[int]:
        """Return up to `limit` tokens that followed an earlier occurrence of the last n-gram."""
        new, start = token_ids[self._num_seen :], self._start
        if start and token_ids[start : start + len(new)] == new:
            start += len(new)
        else:
            start = self._look_up(token_ids)
        self._start, self._num_seen = start, max(2, len(token_ids))
        return token_ids[start : start + limit] if start else []

    def _look_up(self, token_ids: list[int]) -> int:
        if len(token_ids) < 3:
            return 0
        after, end = self._after, self._num_seen
        x = token_ids[end - 3] if end > 2 else -1  # not a token, so this trigram is never looked up
        y = token_ids[end - 2]
        # Index the n-grams that end before the last token.
        for z in token_ids[end - 1 : -1]:
            after[x, y, z] = after[y, z] = end
            x, y, end = y, z, end + 1
        z = token_ids[-1]
        # A trigram seldom recurs by chance; a bigram is the fallback.
        start = after.get((x, y, z)) or after.get((y, z), 0)
        if start:  # repeated text is not indexed, so index this trigram now
            after.setdefault((x, y, z), end)
        return start


def accepted(x: Many[int], y: Many[SampledToken]) -> Many[SampledToken]:
    """Return the target's tokens y up to and including the first that differs from its draft x."""
    for num_accepted, draft in enumerate(x):
        if y[num_accepted].token_id != draft:
            return y[: num_accepted + 1]
    return y


class Speculation:
    """Sets the drafts of the engine's sequences, if a drafter is configured."""

    def __init__(self, setting: str | Drafter | None, info: ModelInfo) -> None:
        self._drafter = create(setting)
        if self._drafter is not None and self._drafter.vocab_size not in (None, info.vocab_size):
            raise ValueError(
                f"the drafter's vocabulary has {self._drafter.vocab_size} tokens, "
                f"the model's {info.vocab_size}"
            )

    def draft(self, running: Many[Sequence]) -> None:
        """Draft the next tokens of all decoding sequences."""
        if self._drafter is None:
            return
        decoding = [s for s in running if s.is_decoding and not s.drafts and s.is_ready]
        limits = [sequence.max_drafts() for sequence in decoding]
        if not any(limits):
            return
        drafts = self._drafter.draft(decoding, limits)
        for sequence, drafted, limit in zip(decoding, drafts, limits, strict=True):
            sequence.drafts = tuple(drafted[:limit])

    def forget(self, request_id: int) -> None:
        if self._drafter is not None:
            self._drafter.forget(request_id)


def create(setting: str | Drafter | None) -> Drafter | None:
    """Create the drafter for a setting: none for "" or None, prompt lookup for "ngram:K".

    Raises:
        ValueError: The setting is invalid, or K is out of range.
    """
    if setting is None or setting == "":
        return None
    if not isinstance(setting, str):
        return setting
    kind, _, number = setting.partition(":")
    if kind != "ngram" or not number.isdecimal():
        raise ValueError(f"speculate is {setting!r}, not 'ngram:K'")
    return NgramDrafter(int(number))


def checked(num_drafts: int) -> int:
    """Return `num_drafts`; raise ValueError unless it is between 1 and `MAX_DRAFTS`."""
    if not 1 <= num_drafts <= MAX_DRAFTS:
        raise ValueError(f"num_drafts is {num_drafts}, not between 1 and {MAX_DRAFTS}")
    return num_drafts
