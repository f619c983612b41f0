"""Batches built by hand and a greedy loop over an executor, for tests below the engine."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kernels import PagedBatch
from kernels.contract import Scratch, Windowed
from wire.options import Options
from worker.executor.batch import Batch, BatchType, Sampling

DEFAULTS = Options()


@dataclass
class Text:
    """One sequence of a test: its tokens, how many have KV, its blocks."""

    token_ids: list[int]
    blocks: list[int]
    computed: int = 0
    options: Options = DEFAULTS
    request_id: int = 0
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)


def batch_of(chunks: Sequence[tuple[Text, int]], block_size: int) -> Batch:
    """Return the batch that computes the next n tokens of each text; samples those that end."""
    columns: dict[str, list[int]] = {"ids": [], "positions": [], "slots": [], "rows": []}
    starts, lens, samplings = [0], [], []
    tables = np.zeros((len(chunks), max(len(text.blocks) for text, _ in chunks)), np.int32)
    for index, (text, count) in enumerate(chunks):
        tables[index, : len(text.blocks)] = text.blocks
        for position in range(text.computed, text.computed + count):
            columns["ids"].append(text.token_ids[position])
            columns["positions"].append(position)
            block = text.blocks[position // block_size]
            columns["slots"].append(block * block_size + position % block_size)
        starts.append(len(columns["ids"]))
        lens.append(text.computed + count)
        if lens[-1] == len(text.token_ids):
            columns["rows"].append(starts[-1] - 1)
            samplings.append(sampling(text))
    arrays = {name: np.array(values, np.int32) for name, values in columns.items()}
    return Batch(
        kind=BatchType.MIXED,
        token_ids=arrays["ids"],
        positions=arrays["positions"],
        slots=arrays["slots"],
        query_starts=np.array(starts, np.int32),
        context_lens=np.array(lens, np.int32),
        block_tables=tables,
        sample_rows=arrays["rows"],
        samplings=tuple(samplings),
    )


def sampling(text: Text) -> Sampling:
    return Sampling(
        text.request_id, text.options, len(text.token_ids), text.prompt_len, text.token_ids
    )


def with_windows(batch: PagedBatch, window_pool: torch.Tensor) -> PagedBatch:
    """Return a batch whose layers with a window have the same blocks of a pool of their own."""
    return replace(batch, windowed=Windowed(window_pool, replace(batch, scratch=Scratch())))


def advance(executor: Any, chunks: Sequence[tuple[Text, int]], block_size: int) -> Any:
    """Run one step, append what was sampled, return the logits to keep."""
    batch = batch_of(chunks, block_size)
    logits = executor.forward(batch)
    sampled = iter(executor.sample(logits, batch))
    for text, count in chunks:
        text.computed += count
        if text.computed == len(text.token_ids):
            text.token_ids.append(next(sampled).token_id)
    return deepcopy(logits)
