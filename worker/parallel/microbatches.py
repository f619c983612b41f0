"""Splits a step into microbatches, so that the pipeline stages of a model compute concurrently.

While the second stage computes the first microbatch, the first stage computes the second.  A
microbatch may end inside a sequence, because the next one finds the KV of the tokens before it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch

from kernels import PagedBatch
from worker.compute.kv_cache import TorchKVCache
from worker.compute.model import Model
from worker.executor.torch import Step, with_pools

# A smaller microbatch takes nearly as long, because most of the time is spent on loading weights.
MIN_TOKENS: Final = 128


def num_microbatches(num_tokens: int, num_stages: int, *, has_states: bool) -> int:
    """Return the number of microbatches for a step: two per stage, if they are large enough.

    A step with recurrent states is not split, because no state is stored between microbatches.
    """
    if num_stages == 1 or has_states:
        return 1
    return max(1, min(2 * num_stages, num_tokens // MIN_TOKENS))


def compute(model: Model, cache: TorchKVCache, step: Step) -> list[torch.Tensor]:
    """Compute this process's part of a step.

    Returns:
        For each microbatch, the float32 logits of its rows: [rows, vocab] in the leader, [0, vocab]
        in the other processes.
    """
    device, microbatches, logits = model.device, split(step), []
    for microbatch in microbatches:
        token_ids, positions, rows = (
            it.to(device) for it in (microbatch.token_ids, microbatch.positions, microbatch.rows)
        )
        batch = with_pools(cache, microbatch)
        found = model.forward(token_ids, positions, cache.pool, batch, rows)
        # The next microbatch overwrites the logits.
        logits.append(found if len(microbatches) == 1 else found.clone())
    return logits


def split(step: Step) -> list[Step]:
    if step.num_microbatches == 1:
        return [step]
    return [_microbatch(step, start, stop) for start, stop in pairwise(_boundaries(step))]


def in_order(step: Step, logits: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the logits of all microbatches, [R, vocab], in the order of `step.rows`."""
    if len(logits) == 1:
        return logits[0]
    # In `step.rows`, scored rows follow sampled rows, whatever their order in the batch.
    inner = torch.tensor(_boundaries(step)[1:-1])
    microbatches = torch.bucketize(step.rows, inner, right=True)
    order = microbatches.sort(stable=True).indices
    return torch.cat(logits)[order.argsort().to(logits[0].device)]


def _boundaries(step: Step) -> list[int]:
    num_tokens = len(step.token_ids)
    return [num_tokens * it // step.num_microbatches for it in range(step.num_microbatches + 1)]


def _microbatch(step: Step, start: int, stop: int) -> Step:
    batch = step.batch
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    inside = ((starts < stop) & (ends > start)).nonzero().flatten()
    first, last = int(inside[0]), int(inside[-1]) + 1
    query_starts = batch.query_starts[first : last + 1].clamp(start, stop) - start
    context_lens = batch.context_lens[first:last] - (ends[first:last] - stop).clamp(min=0)
    rows = step.rows[(step.rows >= start) & (step.rows < stop)]

    def part_of(batch: PagedBatch) -> PagedBatch:
        tables = batch.block_tables[first:last]
        return PagedBatch(batch.slots[start:stop], query_starts, context_lens, tables)

    return Step(
        step.token_ids[start:stop],
        step.positions[start:stop],
        rows - start,
        part_of(batch),
        windowed=None if step.windowed is None else part_of(step.windowed),
    )
