"""Prompts without history: by our kernel, or by torch's attention where that was quicker.

Torch's FlashAttention reads dense keys, so each sequence's blocks are gathered first; the measured
time includes that.  Our kernel computes whatever has a past, a window, a cap or sinks.  cuDNN's
attention is left out, for it makes a plan for each new length, and the step would wait for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import pairwise

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.contract import PagedBatch
from kernels.cuda.pinned import upload

# The least of so many times counts; the first run compiles.
REPEATS = 5
# Tokens; a prompt takes the way of the longest of these that is not longer than the prompt.
LENGTHS = (256, 1024, 4096)


class Way(Enum):
    """The kernel that attends to a prompt."""

    OURS = "ours"
    FLASH = "flash"


# (length, way) ascending: prompts from that length on take that way, shorter ones than all OURS.
Table = tuple[tuple[int, Way], ...]
Seconds = Callable[[Way, int], float]


@dataclass(slots=True)
class Chosen:
    """The choice for a step and the uploads that it needs, made by the first layer for all.

    Attributes:
        way: None until the first layer chooses.
        blocks: For each sequence the blocks of its tokens, int32 on the device.
    """

    way: Way | None = None
    blocks: list[torch.Tensor] = field(default_factory=list)


def kind(pool: torch.Tensor, num_heads: int) -> tuple[object, ...]:
    """Return the key of a table: all that decides the time of a prompt, but for its length."""
    return pool.device, pool.dtype, num_heads, *pool.shape[3:]


def measure(seconds: Seconds, lengths: Sequence[int] = LENGTHS) -> Table:
    """Return the table of the quicker way at each length, as `seconds(way, length)` says."""
    return tuple((length, min(Way, key=lambda way: seconds(way, length))) for length in lengths)


def seconds(
    ours: Callable[..., torch.Tensor], pool: torch.Tensor, num_heads: int, way: Way, length: int
) -> float:
    """Return the time of a prompt that way in seconds; infinity where it fails, as without room.

    Args:
        ours: `paged_attention`.
        pool: [N, L, 2, Hkv, B, D] of the same kind; not read or written.
    """
    num_blocks = -(-length // pool.shape[4])
    batch = PagedBatch(
        slots=torch.arange(length, dtype=torch.int32),
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.randperm(num_blocks, dtype=torch.int32)[None],
    )
    batch.scratch.of(Chosen).way = way
    try:
        # Not the pool itself, which may be too small; and not zeros, with which a GPU is faster.
        own = torch.randn(num_blocks, 1, *pool.shape[2:], dtype=pool.dtype, device=pool.device)
        query = own.new_empty(length, num_heads, pool.shape[5]).normal_()
        call = partial(ours, query, own, 0, batch, 1.0, None)
        if way is Way.FLASH:
            call = partial(flash, query, own[:, 0], batch, 1.0)
        return min(_elapsed_s(call) for _ in range(REPEATS))
    except RuntimeError:
        return math.inf


def _elapsed_s(call: Callable[[], torch.Tensor]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def choose(table: Table, batch: PagedBatch) -> Way:
    """Return the way of a step, by its shortest prompt; OURS if any sequence has a past."""
    chosen = batch.scratch.of(Chosen)
    if chosen.way is None:
        chosen.way, tokens = Way.OURS, batch.query_starts.diff()
        if torch.equal(tokens, batch.context_lens):
            shortest = int(tokens.min())
            ways = [way for length, way in table if length <= shortest]
            chosen.way = ways[-1] if ways else Way.OURS
    return chosen.way


def flash(query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, scale: float) -> torch.Tensor:
    """Attend to each sequence's own tokens by torch's FlashAttention.

    Args:
        query: [T, Hq, D].
        kv: [N, 2, Hkv, B, D], a layer of the pool.

    Returns:
        [T, Hq, D].
    """
    out, chosen = torch.empty_like(query), batch.scratch.of(Chosen)
    ranges = [*pairwise(batch.query_starts.tolist())]
    if not chosen.blocks:
        counts = (-(-(stop - start) // kv.shape[3]) for start, stop in ranges)
        tables = zip(batch.block_tables.numpy(), counts, strict=True)
        chosen.blocks = upload([table[:count] for table, count in tables], kv.device)
    for (start, stop), blocks in zip(ranges, chosen.blocks, strict=True):
        key, value = kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, : stop - start]
        own = query[start:stop].transpose(0, 1)[None]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            got = scaled_dot_product_attention(
                own, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        out[start:stop] = got[0].transpose(0, 1)
    return out
