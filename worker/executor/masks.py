"""Which tokens may be drawn: what takes tokens out before one is chosen.

After penalties and logit bias, in this order, every row on its own (SPEC 4.8):

    allowed_token_ids   all others are out
    bad_sequences       a token that would complete one of them is out
    min_tokens          EOS and the request's stop ids are out until so many are generated
    structure           what it does not allow is out (`worker.executor.grammars`)

Where a structure allows EOS only, EOS is the next token, whatever came before in this list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import kernels
from wire.options import MAX_BAD_SEQUENCE_LENGTH
from worker.executor.batch import Row, Sampling, rows_of
from worker.executor.grammars import Masks


def mask(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    eos_token_ids: frozenset[int],
    structures: Masks | None = None,
) -> torch.Tensor:
    """Return [R, vocab] logits without what may not be drawn: the same tensor if all may be."""
    rows: list[int] = []
    columns: list[int] = []
    for row in rows_of(samplings, _may_lack_tokens):
        out = _completing(row) if row.options.bad_sequences else set()
        if row.position - row.sampling.prompt_len < row.options.min_tokens:
            out |= eos_token_ids.union(row.options.stop_token_ids)
        # A client may name ids the vocabulary does not have.
        known = [token_id for token_id in out if token_id < logits.shape[1]]
        rows += [row.index] * len(known)
        columns += known
    allowing = rows_of(samplings, lambda it: bool(it.options.allowed_token_ids))
    if not rows and not allowing and structures is None:
        return logits
    masked = _copy(logits)
    for row in allowing:
        known = [it for it in row.options.allowed_token_ids if it < logits.shape[1]]
        masked[row.index] = -torch.inf
        masked[row.index, known] = logits[row.index, known]
    if rows:
        masked[rows, columns] = -torch.inf
    if structures is not None:
        if structures.over:  # nothing else counts there
            masked[structures.over] = logits[structures.over]
        kernels.forbid(masked, structures.rows, structures.bits)
    return masked


def _may_lack_tokens(sampling: Sampling) -> bool:
    # A sequence that may stop before its drafts may stop after them too, but not the reverse.
    options = sampling.options
    num_generated = sampling.position - sampling.prompt_len
    return num_generated < options.min_tokens or bool(options.bad_sequences)


def _completing(row: Row) -> set[int]:
    """Return the tokens that would complete a bad sequence, with the drafts before this row."""
    sampling = row.sampling
    first = max(sampling.prompt_len, len(sampling.token_ids) - MAX_BAD_SEQUENCE_LENGTH)
    answer = (*sampling.token_ids[first:], *sampling.drafts[: row.num_drafts])
    return {
        last
        for *before, last in row.options.bad_sequences
        if answer[len(answer) - len(before) :] == tuple(before)
    }


def _copy(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":  # NumPy takes a tenth of torch's time
        return torch.from_numpy(logits.numpy().copy())
    return logits.clone(memory_format=torch.contiguous_format)
