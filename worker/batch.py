"""What one engine step computes: the tokens of several sequences side by side, as flat arrays.

Seed 002's micro-batch: tokens of one forward pass, of one or many sequences, prompt or generated.
NumPy only; an executor turns the arrays into what its device wants.  What is made for each row of
each step is a `msgspec.Struct`: a third of a tuple's cost, and no work for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from wire.options import Options
from worker.occurrences import Occurrences
from worker.scores import PromptScores
from worker.sequence import Sequence

Int32 = npt.NDArray[np.int32]


class BatchType(StrEnum):
    """Whether a step reads prompts, generates, or both (seed 002)."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How large a step may be and what may share it (seed 002).

    Attributes:
        max_ubatch_tokens: Tokens of one step; a longer prompt is read in chunks.
        max_sbatch_sequences: Sequences that run side by side.
        prefer_pure_decode: Never mix: while something generates, every other step reads prompts.
        dynamic_batching: New sequences join running ones; else they wait until all have ended.
        ageing_s: One point of priority goes ahead of so many seconds of waiting.
    """

    max_ubatch_tokens: int = 512
    max_sbatch_sequences: int = 256
    prefer_pure_decode: bool = False
    dynamic_batching: bool = True
    ageing_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_ubatch_tokens", "max_sbatch_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not at least 1")
        if not self.ageing_s > 0:
            raise ValueError(
                f"ageing_s is {self.ageing_s}, not over 0: low priorities would starve"
            )


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The next `num_tokens` tokens of a sequence, to be computed in one step.

    `drafts` are guessed tokens after the sequence's last, computed and sampled with it.
    """

    sequence: Sequence
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the batch: drafts are computed like tokens."""
        return self.num_tokens + len(self.drafts)


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """How to draw the next token of one sequence: `position` is the index that token will have.

    Before it come `token_ids` (prompt and output, `prompt_len` of them prompt).  With D `drafts`
    it stands for D + 1 rows: row d draws the token after the first d of them, d positions later.
    `occurrences` may keep the numbers of `token_ids` from step to step, for whoever has penalties.
    """

    request_id: int
    options: Options
    position: int
    prompt_len: int
    token_ids: list[int]
    occurrences: Occurrences | None = None
    drafts: tuple[int, ...] = ()


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sampled row: where its logits are, and after how many of the drafts it draws."""

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
    samplings: Many[Sampling], is_wanted: Callable[[Sampling], bool] = lambda _: True
) -> list[Row]:
    """Return the rows of the wanted ones among all samplings of a step."""
    rows: list[Row] = []
    start = 0
    for sampling in samplings:
        count = 1 + len(sampling.drafts)
        if is_wanted(sampling):
            rows += [Row(start + d, sampling, d) for d in range(count)]
        start += count
    return rows


class Scoring(NamedTuple):
    """Positions of one prompt whose next token is known and whose logprob is wanted.

    `next_token_ids` has one entry for each scored row; `num_top` of the likeliest go along.
    """

    scores: PromptScores
    next_token_ids: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, of which R need a next token.

    Attributes:
        token_ids: [T] input token ids, sequence after sequence.
        positions: [T] index of each token in its sequence.
        slots: [T] where its KV goes: block * block_size + offset.
        query_starts: [S + 1] token range of sequence s is [query_starts[s], query_starts[s + 1]).
        context_lens: [S] tokens each sequence attends to, this step's included.
        block_tables: [S, max blocks] physical block of each logical block, padded with 0.
        sample_rows: [R] rows of T whose logits are wanted, ascending.
        samplings: One for each sequence that is sampled; together they have R rows.
        score_rows: [Q] rows of T whose logits are wanted to score prompts; nearly always none.
        scorings: Together they have Q next tokens, in the order of the rows.
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

    def keep_scores(self, scored: list[bytes]) -> None:
        """Give each sequence the packed rows of its scoring."""
        for scoring, rows in zip(self.scorings, scored, strict=True):
            scoring.scores.add(len(scoring.next_token_ids), rows)


def build(kind: BatchType, chunks: Many[Chunk], block_size: int) -> Batch:
    """Lay the chunks of one step side by side; those that end their sequence are sampled.

    A chunk with D drafts has D + 1 sampled rows: its last token's and each draft's.
    """
    counts = np.array([chunk.num_tokens + len(chunk.drafts) for chunk in chunks], np.int32)
    starts = np.array([chunk.sequence.num_computed_tokens for chunk in chunks], np.int32)
    query_starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    block_tables = _block_tables(chunks)
    rows = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
    positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[rows]
    blocks, offsets = np.divmod(positions, block_size)
    slots = block_tables[rows, blocks] * block_size + offsets
    score_rows, scorings = _scorings(chunks, query_starts)
    sample_rows, samplings = _samplings(chunks, query_starts[1:].tolist())
    return Batch(
        kind=kind,
        token_ids=_token_ids(chunks),
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lens=starts + counts,
        block_tables=block_tables,
        sample_rows=np.array(sample_rows, np.int32),
        samplings=tuple(samplings),
        score_rows=score_rows,
        scorings=scorings,
    )


def _block_tables(chunks: Many[Chunk]) -> Int32:
    tables = [chunk.sequence.block_table for chunk in chunks]
    # Padded as bytes: a copy row by row into an array takes three times as long.
    row_bytes = 4 * max(map(len, tables))
    rows = [table.tobytes().ljust(row_bytes, b"\0") for table in tables]
    return np.frombuffer(bytearray().join(rows), np.int32).reshape(len(tables), -1)


def _token_ids(chunks: Many[Chunk]) -> Int32:
    token_ids: list[int] = []
    for chunk in chunks:
        sequence, num_tokens = chunk.sequence, chunk.num_tokens
        start = sequence.num_computed_tokens
        if num_tokens == 1:
            token_ids.append(sequence.token_ids[start])
        else:
            token_ids += sequence.token_ids[start : start + num_tokens]
        if chunk.drafts:
            token_ids += chunk.drafts
    return np.array(token_ids, np.int32)


def _scorings(chunks: Many[Chunk], query_starts: Int32) -> tuple[Int32, tuple[Scoring, ...]]:
    rows: list[int] = []
    scorings: list[Scoring] = []
    for index, chunk in enumerate(chunks):
        sequence = chunk.sequence
        if sequence.scores is None:
            continue
        start = sequence.num_computed_tokens
        wanted = sequence.scores.wanted(start, chunk.num_tokens)
        if wanted:
            first_row = int(query_starts[index]) - start
            rows += [first_row + position for position in wanted]
            next_token_ids = sequence.token_ids[wanted.start + 1 : wanted.stop + 1]
            num_top = sequence.options.prompt_logprobs or 0
            scorings.append(Scoring(sequence.scores, next_token_ids, num_top))
    return np.array(rows, np.int32), tuple(scorings)


def _samplings(chunks: Many[Chunk], ends: list[int]) -> tuple[list[int], list[Sampling]]:
    """Return the rows to be sampled, and how; `ends` is the row after each chunk's last."""
    rows: list[int] = []
    samplings: list[Sampling] = []
    for chunk, end in zip(chunks, ends, strict=True):
        sequence, drafts = chunk.sequence, chunk.drafts
        token_ids = sequence.token_ids
        position = len(token_ids)
        if sequence.num_computed_tokens + chunk.num_tokens < position:
            continue
        request_id, options, prompt_len = sequence.request_id, sequence.options, sequence.prompt_len
        seen = sequence.occurrences
        samplings.append(
            Sampling(request_id, options, position, prompt_len, token_ids, seen, drafts)
        )
        rows.extend(range(end - len(drafts) - 1, end))
    return rows, samplings
