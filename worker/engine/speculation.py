"""Speculative decoding: draft the next tokens cheaply, verify all drafts in one forward.

In the letters of the paper (Leviathan et al. 2023): x_1 ... x_K are drafts, drawn from p; q_i is
the target's distribution after x_1 ... x_i; y_i, for i from 0 to K, is drawn from q_i.  The rule is

    accept x_i with probability min(1, q(x_i) / p(x_i)), else draw from norm(max(0, q - p))

and here p is a point at x_i, whoever drafted it.  Then the probability is q(x_i), and the other
distribution is q without x_i.  Drawing y ~ q and comparing does both at once: y = x_i has
probability q(x_i), and a y that differs is distributed as q without x_i.  So the sampler's own draw
is the verification, and as its generator is keyed by (seed, choice, position), what comes out is
not just distributed like the plain text: it is the plain text, greedy or not, here or on another
worker.

A sequence whose drafts are rejected gets fewer, one whose drafts are all accepted twice as many.

The KV of a rejected draft lies behind the sequence's computed tokens: the next step overwrites it,
nothing reads it, no block with it is registered.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from worker.engine.sequence import MAX_DRAFTS, Sequence
from worker.executor.contract import ModelInfo, SampledToken


class Drafter(Protocol):
    """Drafts how sequences go on.  Wrong drafts cost time, never correctness.

    `vocab_size` is that of the tokens it may draft; None if it only repeats tokens of the text.
    """

    vocab_size: int | None

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        """Return at most `limits[i]` likely next tokens of each sequence, none if in doubt."""

    def forget(self, request_id: int) -> None:
        """Drop what is kept for a sequence; it has ended, or never was known."""


class NgramDrafter:
    """Prompt lookup: drafts what followed the last time that the text's last tokens occurred.

    Each sequence has an index from n-grams to the position after an occurrence, the latest that
    was no mere repetition.  It grows with the text: a draft takes time for the new tokens only.
    """

    vocab_size: int | None = None

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = checked(num_drafts)
        self._indexes: dict[int, _NgramIndex] = {}

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        """See `Drafter`."""
        most = self.num_drafts
        return [
            self._index(sequence).find(sequence.token_ids, limit if limit < most else most)
            for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def forget(self, request_id: int) -> None:
        """See `Drafter`."""
        self._indexes.pop(request_id, None)

    def _index(self, sequence: Sequence) -> _NgramIndex:
        index = self._indexes.get(sequence.request_id)
        if index is None:
            index = self._indexes[sequence.request_id] = _NgramIndex()
        return index


class _NgramIndex:
    """Where each pair and each triple of a growing text occurred, and where it goes on.

    As long as the text repeats what followed an occurrence, nothing is looked up, and nothing is
    indexed: those n-grams are known.
    """

    __slots__ = ("_after", "_num_seen", "_start")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._num_seen = 2
        self._start = 0  # where the token is that the next one may repeat; 0 for none

    def find(self, token_ids: list[int], limit: int) -> list[int]:
        """Return what followed an earlier occurrence of the longest known ending."""
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
        x = token_ids[end - 3] if end > 2 else -1  # no token: this triple is never looked up
        y = token_ids[end - 2]
        # Index what something follows: the n-grams that end before the last token.
        for z in token_ids[end - 1 : -1]:
            after[x, y, z] = after[y, z] = end
            x, y, end = y, z, end + 1
        z = token_ids[-1]
        # A triple is seldom there by chance; a pair is the last resort.
        start = after.get((x, y, z)) or after.get((y, z), 0)
        if start:  # while the text repeats what follows nothing is indexed, so this triple is now
            after.setdefault((x, y, z), end)
        return start


def accepted(x: Many[int], y: Many[SampledToken]) -> Many[SampledToken]:
    """Return the tokens of the target that count: each y up to the first that is not its x.

    Args:
        x: K drafts.
        y: K + 1 tokens of the target; y[i] follows the drafts before x[i].
    """
    for num_accepted, draft in enumerate(x):
        if y[num_accepted].token_id != draft:
            return y[: num_accepted + 1]
    return y


class Speculation:
    """The engine's side: asks the drafter for drafts, if there is one."""

    def __init__(self, setting: str | Drafter | None, info: ModelInfo) -> None:
        self._drafter = create(setting)
        if self._drafter is not None and self._drafter.vocab_size not in (None, info.vocab_size):
            raise ValueError(
                f"the drafter's vocabulary has {self._drafter.vocab_size} tokens, "
                f"the model's {info.vocab_size}"
            )

    def draft(self, running: Many[Sequence]) -> None:
        """Have the next tokens of all sequences that generate drafted."""
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
        """Have the drafter drop what it keeps for a sequence that has ended."""
        if self._drafter is not None:
            self._drafter.forget(request_id)


def create(setting: str | Drafter | None) -> Drafter | None:
    """Make the drafter a setting names: "" or None for none, "ngram:K" for K drafts.

    Raises:
        ValueError: It names nothing, or too many drafts.
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
    """Return how many drafts a sequence is to get at a time.

    Raises:
        ValueError: It is not between 1 and `MAX_DRAFTS`.
    """
    if not 1 <= num_drafts <= MAX_DRAFTS:
        raise ValueError(f"num_drafts is {num_drafts}, not between 1 and {MAX_DRAFTS}")
    return num_drafts
