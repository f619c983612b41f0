"""Choose the fastest attention for prompts: one of our kernels, or torch's.

Torch's FlashAttention reads dense keys, so each sequence's blocks are gathered first; the measured
time includes that.  Sequences with a past, a window, a cap or sinks always use our kernel. cuDNN's
attention is not used, because it makes a plan for each new length, for which the step would wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import pairwise

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.contract import PagedBatch, Scratch, Softmax
from kernels.cuda.pinned import upload

# The shortest of this many runs counts; the first run compiles.
REPEATS = 5
# Tokens; a prompt uses the method of the longest of these that is not longer than the prompt.
LENGTHS = (256, 1024, 4096)
# (context, queries) for which our two kernels must agree: chunks, ragged tails, split keys.
TRIALS = [(700, 300), (129, 129), (2100, 70), (64, 64)]


class Way(Enum):
    """A method of prompt attention: the kernel `attend`, Hopper's `attend_wide`, or torch's."""

    OURS = "ours"
    WIDE = "wide"
    FLASH = "flash"


# The method for prompts from each length on, ascending.  The first entry has length 0 and is one of
# our kernels, which also computes every step that is not made of whole prompts.
Table = tuple[tuple[int, Way], ...]
Seconds = Callable[[Way, int], float]
# Computes attention by one of our kernels: takes a method, then the arguments of `paged_attention`.
Attend = Callable[..., torch.Tensor]


@dataclass(slots=True)
class Chosen:
    """The method for a step and the uploads that it needs, chosen by the first layer for all.

    Attributes:
        way: None until the first layer chooses.
        blocks: For each sequence the blocks of its tokens, int32 on the device.
    """

    way: Way | None = None
    blocks: list[torch.Tensor] = field(default_factory=list)


def kind(pool: torch.Tensor, num_heads: int) -> tuple[object, ...]:
    """Return the key of a table: everything but its length that decides a prompt's time."""
    return pool.device, pool.dtype, num_heads, *pool.shape[3:]


def measure(seconds: Seconds, lengths: Sequence[int] = LENGTHS, *, has_wide: bool = False) -> Table:
    """Return which implementation is fastest for each prompt length, by calling `seconds`.

    Of our own two kernels, the one that is faster at the longest length is used for all.
    """
    ours = Way.OURS
    if has_wide and seconds(Way.WIDE, lengths[-1]) < seconds(Way.OURS, lengths[-1]):
        ours = Way.WIDE
    ways = ours, Way.FLASH
    quicker = [(n, min(ways, key=lambda way: seconds(way, n))) for n in lengths]
    return (0, ours), *quicker


def seconds(attend: Attend, pool: torch.Tensor, num_heads: int, way: Way, length: int) -> float:
    """Measure how long a prompt takes; infinity if it runs out of memory or fails."""
    try:
        query, own, batch = _random([(length, length)], pool, num_heads)
        call = partial(attend, way, query, own, 0, batch, Softmax(1.0))
        if way is Way.FLASH:
            call = partial(flash, query, own[:, 0], batch, 1.0)
        return min(_elapsed_s(call) for _ in range(REPEATS))
    except RuntimeError:
        return math.inf


def agree(attend: Attend, pool: torch.Tensor, num_heads: int) -> bool:
    """Return whether our two kernels agree on random prompts, within rounding."""
    query, own, batch = _random(TRIALS, pool, num_heads)
    limit = 4 * torch.finfo(pool.dtype).eps
    for window in (None, 100):
        ours, wide = (
            # With a scale of 1 few keys outweigh the others, so each of them counts.
            attend(way, query, own, 0, replace(batch, scratch=Scratch()), Softmax(1.0, window))
            for way in (Way.OURS, Way.WIDE)
        )
        if not torch.allclose(ours, wide, rtol=limit, atol=limit):
            return False
    return True


def _random(
    lens: list[tuple[int, int]], pool: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Return random queries, a pool of one layer, and the batch for these (context, queries).

    The pool is a new one, because the worker's may be too small.  It is random, because a GPU
    multiplies zeros faster.
    """
    counts = [-(-context // pool.shape[4]) for context, _ in lens]
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    blocks = torch.randperm(sum(counts), dtype=torch.int32)
    for table, count in zip(tables, counts, strict=True):
        table[:count], blocks = blocks[:count], blocks[count:]
    contexts, queries = torch.tensor(lens, dtype=torch.int32).unbind(1)
    starts = torch.cat((queries.new_zeros(1), queries.cumsum(0, dtype=torch.int32)))
    num_tokens = int(starts[-1])
    slots = torch.arange(num_tokens, dtype=torch.int32)
    batch = PagedBatch(slots, starts, contexts.contiguous(), tables)
    own = torch.randn(sum(counts), 1, *pool.shape[2:], dtype=pool.dtype, device=pool.device)
    query = own.new_empty(num_tokens, num_heads, pool.shape[5]).normal_()
    return query, own, batch


def _elapsed_s(call: Callable[[], torch.Tensor]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def choose(table: Table, batch: PagedBatch) -> Way:
    """Return a step's method: its shortest prompt's, or the first if a sequence has a past."""
    chosen = batch.scratch.of(Chosen)
    if chosen.way is None:
        tokens = batch.query_starts.diff()
        shortest = int(tokens.min()) if torch.equal(tokens, batch.context_lens) else 0
        chosen.way = [way for length, way in table if length <= shortest][-1]
    return chosen.way


def flash(query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, scale: float) -> torch.Tensor:
    """Compute attention of each sequence to its own tokens by torch's FlashAttention.

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
