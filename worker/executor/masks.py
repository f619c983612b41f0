"""Masks tokens that the options of a request forbid.

The masks are applied to each row after penalties and logit bias, in this order (SPEC 4.8):

    allowed_token_ids   masks all other tokens
    bad_sequences       masks tokens that would complete one of them
    min_tokens          masks EOS and the request's stop ids until that many tokens are generated

The mask of a structure (`worker.executor.grammars`) comes last.  If it allows only EOS, EOS is the
next token even if the options forbid it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wire.options import MAX_BAD_SEQUENCE_LENGTH
from worker.executor.batch import Row, Sampling, rows_of


def mask(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    eos_token_ids: frozenset[int],
    over: Sequence[int] = (),
) -> torch.Tensor:
    """Return masked [R, vocab] logits, which are the same tensor if no option masks tokens.

    `over` are the rows whose structure allows only EOS; they are not masked.
    """
    limited = rows_of(samplings, is_limited)
    if not limited:
        return logits
    masked, vocab = _copy(logits), logits.shape[1]
    rows: list[int] = []
    columns: list[int] = []
    for row in limited:
        options = row.options
        # Token ids from clients may exceed the vocabulary.
        if options.allowed_token_ids:
            known = [token_id for token_id in options.allowed_token_ids if token_id < vocab]
            masked[row.index] = -torch.inf
            masked[row.index, known] = logits[row.index, known]
        forbidden = _completing(row)
        if row.position - row.sampling.prompt_len < options.min_tokens:
            forbidden |= eos_token_ids.union(options.stop_token_ids)
        known = [token_id for token_id in forbidden if token_id < vocab]
        rows += [row.index] * len(known)
        columns += known
    if rows:
        masked[rows, columns] = -torch.inf
    if over:
        masked[over] = logits[over]
    return masked


def is_limited(sampling: Sampling) -> bool:
    """Return whether the options may mask tokens of the next row."""
    options = sampling.options
    if sampling.position - sampling.prompt_len < options.min_tokens:
        return True
    return bool(options.allowed_token_ids or options.bad_sequences)


def _completing(row: Row) -> set[int]:
    """Return the tokens that would complete a bad sequence after this row's text and drafts."""
    sampling = row.sampling
    first = max(sampling.prompt_len, len(sampling.token_ids) - MAX_BAD_SEQUENCE_LENGTH)
    text = (*sampling.token_ids[first:], *sampling.drafts[: row.num_drafts])
    return {
        last
        for *before, last in row.options.bad_sequences
        if text[len(text) - len(before) :] == tuple(before)
    }


def _copy(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":  # NumPy is ten times as fast as torch
        return torch.from_numpy(logits.numpy().copy())
    return logits.clone(memory_format=torch.contiguous_format)
