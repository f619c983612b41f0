"""Prompts without history: by our kernel, or by torch's attention where that was quicker.

Torch's FlashAttention reads dense keys, so each sequence's blocks are gathered for it first, and
that is timed with it.  Whatever has a past, a window, a cap or sinks is our kernel's.  cuDNN is not
asked, for it plans anew for each length, while a step waits.
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

# The least of so many times counts; the first compiles.
REPEATS = 5
# Tokens; a prompt goes as the longest of these that is no longer than it.
LENGTHS = (256, 1024, 4096)


class Way(Enum):
    """What attends to a prompt."""

    OURS = "ours"
    FLASH = "flash"


# The way to go from each measured length on, ascending; ours below.
Table = tuple[tuple[int, Way], ...]
Seconds = Callable[[Way, int], float]


@dataclass(slots=True)
class Chosen:
    """What the layers of a step have in common, once the first has asked.

    Attributes:
        blocks: Those of each sequence's own tokens, int32 on the device.
    """

    way: Way | None = None
    blocks: list[torch.Tensor] = field(default_factory=list)


def kind(pool: torch.Tensor, num_heads: int) -> tuple[object, ...]:
    """Return what the time of a prompt depends on, beside the number of its tokens."""
    return pool.device, pool.dtype, num_heads, *pool.shape[3:]


def measure(seconds: Seconds, lengths: Sequence[int] = LENGTHS) -> Table:
    """Return the table of `seconds(way, length)`."""
    return tuple((length, min(Way, key=lambda way: seconds(way, length))) for length in lengths)


def seconds(
    ours: Callable[..., torch.Tensor], pool: torch.Tensor, num_heads: int, way: Way, length: int
) -> float:
    """Return the time of a prompt that way; infinity if there is no room, or no such way.

    Args:
        ours: `paged_attention`.
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
        # Not the pool itself, which may be small; and no zeros, by which a GPU is quicker.
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
    """Return the way of a step, as of its shortest prompt; ours if any sequence has a past."""
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
    """
    out, held = torch.empty_like(query), batch.scratch.of(Chosen)
    ranges = [*pairwise(batch.query_starts.tolist())]
    if not held.blocks:
        counts = (-(-(stop - start) // kv.shape[3]) for start, stop in ranges)
        tables = zip(batch.block_tables.numpy(), counts, strict=True)
        held.blocks = upload([table[:count] for table, count in tables], kv.device)
    for (start, stop), blocks in zip(ranges, held.blocks, strict=True):
        key, value = kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, : stop - start]
        own = query[start:stop].transpose(0, 1)[None]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            got = scaled_dot_product_attention(
                own, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        out[start:stop] = got[0].transpose(0, 1)
    return out
