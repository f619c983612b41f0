"""The input of one step: tokens of several sequences, concatenated in NumPy arrays (seed 002).

`worker.engine.batch` builds it.  Objects that every row of every step needs are `msgspec.Struct`,
which take a third of a tuple's time to create, and no garbage collection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from wire.logprobs import join_prompt_logprobs
from wire.options import Options
from worker.executor.structured_output import Structured
from worker.executor.token_counts import Occurrences

Int32 = npt.NDArray[np.int32]


class BatchType(StrEnum):
    """The kind of a step: it prefills, decodes, or does both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """How to sample the next token of one sequence, at index `position`, after `token_ids`.

    With D `drafts` it describes D + 1 rows: row d samples the token after the first d drafts.
    `occurrences` keeps the token counts for penalties from step to step.
    """

    request_id: int
    options: Options
    position: int
    prompt_len: int
    token_ids: list[int]
    occurrences: Occurrences | None = None
    drafts: tuple[int, ...] = ()
    structured: Structured | None = None


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sampled row: the index of its logits, and the number of drafts that precede it."""

    index: int
    sampling: Sampling
    num_drafts: int

    @property
    def options(self) -> Options:
        return self.sampling.options

    @property
    def position(self) -> int:
        return self.sampling.position + self.num_drafts


def rows_of(
    samplings: Sequence[Sampling], is_wanted: Callable[[Sampling], bool] = lambda _: True
) -> list[Row]:
    """Return the rows of those samplings for which `is_wanted` returns True."""
    rows: list[Row] = []
    start = 0
    for sampling in samplings:
        count = 1 + len(sampling.drafts)
        if is_wanted(sampling):
            rows += [Row(start + d, sampling, d) for d in range(count)]
        start += count
    return rows


class PromptScores:
    """The logprobs of a prompt's tokens after the first, collected chunk by chunk.

    Positions to be scored are computed even if the prefix cache has their KV.
    """

    __slots__ = ("_num_tokens", "_num_top", "_rows", "num_scored")

    def __init__(self, num_tokens: int, num_top: int) -> None:
        self._num_tokens = num_tokens
        self._num_top = num_top
        self._rows: list[bytes] = []
        self.num_scored = 0

    def wanted(self, start: int, num_tokens: int) -> range:
        """Return the positions of a chunk that are still to be scored."""
        end = min(start + num_tokens, self._num_tokens - 1)
        return range(max(start, self.num_scored), end)

    def add(self, num_rows: int, rows: bytes) -> None:
        """Append the packed scores of the next `num_rows` positions."""
        self.num_scored += num_rows
        self._rows.append(rows)

    def packed(self) -> bytes:
        """Return all scores in the format of the body of PREFILL_DONE."""
        num_top = self._num_top
        if self.num_scored:  # a small vocabulary may have fewer than requested
            num_top = (sum(map(len, self._rows)) // self.num_scored - 4) // 8
        return join_prompt_logprobs(num_top, self._rows)


class Scoring(NamedTuple):
    """Rows of one prompt to be scored: the token after each, and the number of top logprobs."""

    scores: PromptScores
    next_token_ids: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences; after R of the tokens, a next token is sampled.

    Attributes:
        token_ids: [T] input token ids, sequence after sequence; -1 - r is the token of row r of
            the previous step (`worker.executor.contract.Drawer`).
        positions: [T] index of each token in its sequence.
        slots: [T] slot of each token's KV: block * block_size + offset.
        query_starts: [S + 1]; the tokens of sequence s are [query_starts[s], query_starts[s + 1]).
        context_lens: [S] number of tokens of each sequence up to the end of this step.
        block_tables: [S, max blocks] physical block of each logical block, padded with 0.
        sample_rows: [R] indexes of the tokens after which to sample, ascending.
        samplings: One for each sampled sequence; together they have R rows.
        score_rows: [Q] indexes of the prompt tokens to score; nearly always empty.
        scorings: One for each scored prompt; together they have Q next tokens.
    """

    kind: BatchType
    token_ids: Int32
    positions: Int32
    slots: Int32
    query_starts: Int32
    context_lens: Int32
    block_tables: Int32
    sample_rows: Int32
    samplings: tuple[Sampling, ...]
    score_rows: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    scorings: tuple[Scoring, ...] = ()

    def sequence_of(self, row: int) -> int:
        """Return the index of the sequence of a sampled row."""
        return int(np.searchsorted(self.query_starts, self.sample_rows[row], side="right")) - 1

    def keep_scores(self, scored: list[bytes]) -> None:
        """Append the packed scores of each scoring to those of its prompt."""
        for scoring, rows in zip(self.scorings, scored, strict=True):
            scoring.scores.add(len(scoring.next_token_ids), rows)
