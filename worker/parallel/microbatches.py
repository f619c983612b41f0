"""Computes a step in pieces, so that the stages of a model compute at the same time.

While the second stage computes the first piece, the first stage computes the second.  A piece is
some tokens of the step; a sequence may be in two, for the KV of its first tokens is there when the
others are computed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch

from kernels import PagedBatch
from worker.compute.kv_cache import TorchKVCache
from worker.compute.model import Model
from worker.executor.torch import Step, with_pools

# A piece of fewer tokens takes nearly as long: most of its time weights are read.
MIN_TOKENS: Final = 128


def num_pieces(num_tokens: int, num_stages: int, *, has_states: bool) -> int:
    """Return into how many pieces a step is cut: two for each stage, if they are large enough.

    With states it is not cut: there is none between two pieces of a sequence.
    """
    return (
        1
        if num_stages == 1 or has_states
        else max(1, min(2 * num_stages, num_tokens // MIN_TOKENS))
    )


def compute(model: Model, cache: TorchKVCache, step: Step) -> list[torch.Tensor]:
    """Compute this process's part of a step of which the others have been told.

    Returns:
        [r, vocab] float32 logits of each piece's rows in the leader, [0, vocab] in others.
    """
    device, pieces, logits = model.device, cut(step), []
    for piece in pieces:
        token_ids, positions, rows = (
            it.to(device) for it in (piece.token_ids, piece.positions, piece.rows)
        )
        batch = with_pools(cache, piece)
        found = model.forward(token_ids, positions, cache.pool, batch, rows)
        logits.append(found if len(pieces) == 1 else found.clone())  # the next may lie there
    return logits


def cut(step: Step) -> list[Step]:
    """Return the pieces of a step, in the order in which every stage computes them."""
    if step.num_pieces == 1:
        return [step]
    return [_piece(step, start, stop) for start, stop in pairwise(_borders(step))]


def in_order(step: Step, logits: list[torch.Tensor]) -> torch.Tensor:
    """Return the logits of all pieces, [R, vocab], as the rows of the step are ordered."""
    if len(logits) == 1:
        return logits[0]
    # Rows that are scored come after those that are sampled, wherever in the step they are.
    inner = torch.tensor(_borders(step)[1:-1])
    pieces = torch.bucketize(step.rows, inner, right=True)
    order = pieces.sort(stable=True).indices
    return torch.cat(logits)[order.argsort().to(logits[0].device)]


def _borders(step: Step) -> list[int]:
    num_tokens = len(step.token_ids)
    return [num_tokens * it // step.num_pieces for it in range(step.num_pieces + 1)]


def _piece(step: Step, start: int, stop: int) -> Step:
    batch = step.batch
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    inside = ((starts < stop) & (ends > start)).nonzero().flatten()
    first, last = int(inside[0]), int(inside[-1]) + 1
    query_starts = batch.query_starts[first : last + 1].clamp(start, stop) - start
    context_lens = batch.context_lens[first:last] - (ends[first:last] - stop).clamp(min=0)
    rows = step.rows[(step.rows >= start) & (step.rows < stop)]

    def piece_of(batch: PagedBatch) -> PagedBatch:
        tables = batch.block_tables[first:last]
        return PagedBatch(batch.slots[start:stop], query_starts, context_lens, tables)

    return Step(
        step.token_ids[start:stop],
        step.positions[start:stop],
        rows - start,
        piece_of(batch),
        windowed=None if step.windowed is None else piece_of(step.windowed),
    )
