"""Penalties and logit bias.

They are applied to each row in this order (SPEC 4.8):

    repetition   for tokens in prompt or output: divides positive logits, multiplies the others
    frequency    is subtracted for each occurrence in the output
    presence     is subtracted if the token is in the output
    logit_bias   is added

They are computed in float64 and rounded once to float32.  Only the affected logits are gathered,
computed and scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from wire.options import Options
from worker.executor.batch import Row, Sampling, rows_of
from worker.executor.token_counts import Occurrences


def adjust(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return [R, vocab] logits after penalties and biases; if there are none, the same tensor."""
    penalized = rows_of(samplings, lambda it: it.options.has_penalties)
    biased = rows_of(samplings, lambda it: bool(it.options.logit_bias))
    if not penalized and not biased:
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    if penalized:
        _penalize(logits, penalized)
    if biased:
        _bias(logits, biased)
    return logits


def _penalize(logits: torch.Tensor, rows: list[Row]) -> None:
    # The rows of one sampling are adjacent, and the first of them has no drafts before it.
    firsts = [row.sampling for row in rows if not row.num_drafts]
    found = [pair for it in firsts for pair in _occurrences(it).along(it.drafts)]
    sizes = [len(token_ids) for token_ids, _ in found]

    def spread(field: Callable[[Options], float]) -> torch.Tensor:
        values = np.array([field(row.options) for row in rows], np.float64)
        return torch.from_numpy(np.repeat(values, sizes)).to(logits.device)

    indexes = np.concatenate([token_ids for token_ids, _ in found])
    starts = np.array([row.index for row in rows], np.int64) * logits.shape[1]
    indexes += np.repeat(starts, sizes)
    where = torch.from_numpy(indexes).to(logits.device)
    counts = np.concatenate([counts for _, counts in found]).astype(np.float64)
    count = torch.from_numpy(counts).to(logits.device)
    flat = logits.view(-1)
    # Indexes are unique, so these two are exact, and four times as fast as flat[where].
    values = flat.index_select(0, where).double()
    repetition = spread(lambda options: options.repetition_penalty)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= count * spread(lambda options: options.frequency_penalty)
    values -= (count > 0) * spread(lambda options: options.presence_penalty)
    flat.index_copy_(0, where, values.to(logits.dtype))


def _bias(logits: torch.Tensor, rows: list[Row]) -> None:
    vocab = logits.shape[1]
    indexes: dict[int, float] = {}
    for row in rows:
        for token_id, bias in row.options.logit_bias:
            if token_id < vocab:  # ids from clients may exceed the vocabulary
                index = row.index * vocab + token_id
                indexes[index] = indexes.get(index, 0.0) + bias
    where = torch.tensor(list(indexes), dtype=torch.int64, device=logits.device)
    bias_of = torch.tensor(list(indexes.values()), dtype=torch.float64, device=logits.device)
    flat = logits.view(-1)
    flat[where] = (flat[where].double() + bias_of).to(logits.dtype)


def _occurrences(sampling: Sampling) -> Occurrences:
    """Return the token counts of the text without its drafts, updated to the last token."""
    if sampling.occurrences is None:
        return Occurrences(sampling.token_ids, sampling.prompt_len)
    sampling.occurrences.update(sampling.token_ids)
    return sampling.occurrences
