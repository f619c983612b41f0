"""The log-probabilities of a prompt, gathered while its chunks are computed.

The logits at a position say how likely the next token was, so all tokens but the first have a
score.  Positions whose logits are wanted have to be computed even if the prefix cache has their KV:
the engine looks here how much of a prompt it may skip.
"""

from __future__ import annotations

from wire.logprobs import join_prompt_logprobs


class PromptScores:
    """Packed rows (`wire.logprobs`) of the tokens after the first, as far as they are known."""

    __slots__ = ("_num_tokens", "_num_top", "_rows", "num_scored")

    def __init__(self, num_tokens: int, num_top: int) -> None:
        self._num_tokens = num_tokens
        self._num_top = num_top
        self._rows: list[bytes] = []
        self.num_scored = 0

    def wanted(self, start: int, num_tokens: int) -> range:
        """Return the positions of a chunk whose logits have to be scored."""
        end = min(start + num_tokens, self._num_tokens - 1)
        return range(max(start, self.num_scored), end)

    def add(self, num_rows: int, rows: bytes) -> None:
        """Take the scores of the next `num_rows` positions."""
        self.num_scored += num_rows
        self._rows.append(rows)

    def packed(self) -> bytes:
        """Return all of them as PREFILL_DONE has them."""
        num_top = self._num_top
        if self.num_scored:  # a small vocabulary has fewer than were asked for
            num_top = (sum(map(len, self._rows)) // self.num_scored - 4) // 8
        return join_prompt_logprobs(num_top, self._rows)
