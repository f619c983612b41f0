"""Builds the input arrays of one engine step."""

from __future__ import annotations

from collections.abc import Sequence as Many

import msgspec
import numpy as np

from worker.engine.sequence import Sequence
from worker.executor.batch import Batch, BatchType, Int32, Sampling, Scoring


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The next `num_tokens` tokens of a sequence to compute in one step, then its `drafts`."""

    sequence: Sequence
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.drafts)


def build(kind: BatchType, chunks: Many[Chunk], block_size: int) -> Batch:
    """Concatenate the chunks of one step into a batch.

    A chunk that reaches the end of its sequence is sampled: one row for its last token and one row
    for each of its drafts.
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
    # Padding the rows as bytes is three times as fast as copying them into an array.
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
    """Return the rows to sample and their settings; `ends[i]` is the row after chunk i's last."""
    rows: list[int] = []
    samplings: list[Sampling] = []
    for chunk, end in zip(chunks, ends, strict=True):
        sequence, drafts = chunk.sequence, chunk.drafts
        token_ids = sequence.token_ids
        position = len(token_ids)
        if sequence.num_computed_tokens + chunk.num_tokens < position:
            continue
        samplings.append(
            Sampling(
                sequence.request_id,
                sequence.options,
                position,
                sequence.prompt_len,
                token_ids,
                sequence.occurrences,
                drafts,
                sequence.structured,
            )
        )
        rows.extend(range(end - len(drafts) - 1, end))
    return rows, samplings
