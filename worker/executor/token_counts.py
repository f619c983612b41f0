"""Token counts of a sequence for penalties, updated incrementally."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


class Occurrences:
    """The U distinct tokens in prompt and output, and how often each occurs in the output."""

    __slots__ = ("_counts", "_ids", "_num_prompt_slots", "_num_seen", "_slots")

    def __init__(self, token_ids: Sequence[int], prompt_len: int) -> None:
        prompt = dict.fromkeys(token_ids[:prompt_len])
        self._slots = {token_id: slot for slot, token_id in enumerate(prompt)}
        self._num_prompt_slots = len(prompt)
        capacity = 2 * len(prompt) + 16
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: len(prompt)] = list(prompt)
        self._counts = np.zeros(capacity, np.int64)
        self._num_seen = prompt_len
        self.update(token_ids)

    def update(self, token_ids: Sequence[int]) -> None:
        """Count the new tokens; `token_ids` are all tokens of the sequence."""
        for token_id in token_ids[self._num_seen :]:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._counts[slot] += 1
        self._num_seen = len(token_ids)

    def rewind(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Stop counting the tokens after the first `num_tokens`, which must include the prompt."""
        slots, counts = self._slots, self._counts
        # Backwards, so that a slot whose count falls to 0 is always the last one.
        for token_id in reversed(token_ids[num_tokens : self._num_seen]):
            slot = slots[token_id]
            counts[slot] -= 1
            if not counts[slot] and slot >= self._num_prompt_slots:
                del slots[token_id]
        self._num_seen = min(self._num_seen, num_tokens)

    def along(self, drafts: Sequence[int]) -> list[tuple[Int64, Int64]]:
        """Return the distinct tokens and their counts with the first 0, 1, ... D drafts included.

        The drafts are not added to the counts.  The first pair is a view, valid until an update.
        """
        ids, counts = self.token_ids, self.counts
        new: dict[int, int] = {}  # slots of tokens that occur only in drafts
        found = [(ids, counts)]
        for token_id in drafts:
            slot = self._slots.get(token_id)
            if slot is None:
                slot = new.setdefault(token_id, len(ids))
            if slot == len(ids):
                ids, counts = np.append(ids, token_id), np.append(counts, 1)
            else:
                counts = counts.copy()
                counts[slot] += 1
            found.append((ids, counts))
        return found

    @property
    def token_ids(self) -> Int64:
        """The distinct tokens in order of first occurrence, shape [U]."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Int64:
        """How often each distinct token occurs in the output, shape [U]."""
        return self._counts[: len(self._slots)]
