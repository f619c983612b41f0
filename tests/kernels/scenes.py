"""Adversarial batches for the operators: a pool full of NaN, permuted blocks, and the formula."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from kernels import PagedBatch, Rectangle, Softmax, contract, reference
from kernels.contract import Backend

NUM_LAYERS = 3
# Elements before a far pool's blocks: more than 32 bits can count, even eight at a time.
FAR = 1 << 35
# Of Linux; Python names it from 3.13 on.
MAP_NORESERVE = 0x4000
# A score of the loud head below is up to about 100 and float32 keeps 1e-5 of that, which its
# exponential turns into as large a share of a weight.  A wrong key or mask is an error of about 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Half a unit in the last place, and a little of what float32 adds to it.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 0.51 * 2**-7, torch.float16: 0.51 * 2**-10}


class Scene(NamedTuple):
    """A pool, a batch whose queries are each sequence's last tokens, and the same KV as arrays."""

    pool: torch.Tensor
    batch: PagedBatch
    query: torch.Tensor
    dense: list[torch.Tensor]  # for each sequence [L, 2, Hkv, context, D], as the pool's dtype
    first_block: int = 0  # blocks before it are nobody's


def scene(
    lens: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    is_far: bool = False,
    first_key: float = 1.0,
    device: torch.device | str = "cpu",
) -> Scene:
    """Sequences of (context, queries) in permuted blocks; every other slot of the pool is NaN.

    If it is far, the blocks lie behind FAR elements that take no memory.  With a `first_key` other
    than 1, a sequence's first key is so many times as long: it outweighs all, or weighs nothing.
    """
    shuffled, generator = (torch.Generator(on).manual_seed(seed) for on in ("cpu", device))
    num_used = sum(-(-context // block_size) for context, _ in lens) + 3
    block_shape = (NUM_LAYERS, 2, num_kv_heads, block_size, head_dim)
    first_block = -(-FAR // math.prod(block_shape)) if is_far else 0
    pool = sparse_pool((first_block + num_used, *block_shape), dtype).to(device)
    pool[first_block:] = math.nan
    order = (first_block + torch.randperm(num_used, generator=shuffled)).tolist()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tables, dense = [], []
    for context, _ in lens:
        table = [order.pop() for _ in range(-(-context // block_size))]
        kv = random(*block_shape[:3], len(table) * block_size, head_dim).to(dtype)
        kv[..., context:, :] = math.nan
        kv[:, 0, :, 0] *= first_key
        blocks = kv.view(*block_shape[:3], len(table), block_size, head_dim)
        pool[table] = blocks.permute(3, 0, 1, 2, 4, 5)
        tables.append(table)
        dense.append(kv[..., :context, :])
    num_tokens = sum(queries for _, queries in lens)
    query = random(num_tokens, num_heads, head_dim).to(dtype)
    # One head far from the others: a softmax that forgets to subtract its maximum overflows.
    query[:, 0] *= 30
    batch = batch_of(lens, tables, block_size)
    return Scene(pool, batch, query, dense, first_block)


def batch_of(lens: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> PagedBatch:
    """Return the batch of (context, queries) sequences in these blocks."""
    padded = torch.full((len(lens), max(map(len, tables)) + 2), 1 << 30, dtype=torch.int32)
    slots, starts = list[int](), [0]
    for row, table, (context, queries) in zip(padded, tables, lens, strict=True):
        row[: len(table)] = torch.tensor(table)  # beyond it: out of range, and never read
        slots += [
            table[position // block_size] * block_size + position % block_size
            for position in range(context - queries, context)
        ]
        starts.append(len(slots))
    contexts = [context for context, _ in lens]
    return PagedBatch(
        slots=torch.tensor(slots, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=padded,
    )


def append(
    backend: Backend,
    pool: torch.Tensor,
    layer: int,
    key_value: torch.Tensor,
    batch: PagedBatch,
    rotation: torch.Tensor | None = None,
) -> None:
    """Write [T, 2, Hkv, D] keys and values of the pool's dtype, as they are without a rotation."""
    num_tokens, _, _, head_dim = key_value.shape
    if rotation is None:
        still = torch.tensor([1.0, 0.0], device=pool.device)[None, :, None]
        rotation = still.repeat(num_tokens, 1, head_dim // 2)
    heads = torch.cat((key_value[:, 0], key_value.flatten(1, 2)), dim=1)  # any queries
    backend.rotate_and_append(heads, rotation, pool, layer, batch)


def sparse_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of which only the pages that are written to take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def sinks_of(it: Scene, seed: int = 0) -> torch.Tensor:
    """Return [Hq] sinks: one that outweighs every key, one that weighs nothing, ordinary ones."""
    sinks = torch.randn(it.query.shape[1], generator=torch.Generator().manual_seed(seed)) * 2
    sinks[-1] = 9.0
    sinks[: len(sinks) // 2] -= 200.0 * torch.arange(len(sinks) // 2)
    return sinks


def formula(
    it: Scene,
    layer: int,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention as its formula has it, [T, Hq, D] in float64."""
    out = []
    for kv, (start, stop) in zip(it.dense, pairwise(it.batch.query_starts.tolist()), strict=True):
        # [Hq, context, D]: each head of the query beside the one of the KV that it shares.
        key, value = kv[layer].double().repeat_interleave(it.query.shape[1] // kv.shape[2], 1)
        keys = torch.arange(key.shape[1], device=key.device)
        position = keys[len(keys) - (stop - start) :, None]
        seen = (keys <= position) & (keys > position - (window or len(keys) + 1))
        scores = it.query[start:stop].double().transpose(0, 1) @ key.mT * scale
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            of_heads = sinks.double()[:, None, None].expand(-1, stop - start, 1)
            scores = torch.cat((scores, of_heads), dim=-1)
        out.append((scores.softmax(-1)[..., : len(keys)] @ value).transpose(0, 1))
    return torch.cat(out)


@contextmanager
def without_unseen(it: Scene, window: int | None) -> Iterator[None]:
    """Make NaN of whole blocks before the window: of a prompt from another worker they are stale.

    What is before the window in a block with keys that are seen, is finite whatever it is.
    """
    blocks, block_size = [], it.pool.shape[4]
    starts, contexts = it.batch.query_starts.tolist(), it.batch.context_lens.tolist()
    for row, context in enumerate(contexts if window else ()):
        first_query = context - (starts[row + 1] - starts[row])
        num_stale = max(0, first_query - (window or 0) + 1) // block_size
        blocks += it.batch.block_tables[row, :num_stale].tolist()
    held = it.pool[blocks].clone()
    it.pool[blocks] = math.nan
    yield
    it.pool[blocks] = held


def check(
    it: Scene,
    window: int | None,
    backend: Any = reference,
    *,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compare attention with the formula; `backend` needs no other operator."""
    scale = 0.75 * it.query.shape[2] ** -0.5  # none that torch takes by itself
    # The rounding of a score grows with the number of its products.
    tolerance = TOLERANCE[it.pool.dtype] * max(1.0, it.query.shape[2] / 64)
    for layer in (0, NUM_LAYERS - 1):
        rest = (it.pool, layer, it.batch)
        softmax = Softmax(scale, window, cap, sinks)
        contract.check_attention(it.query, *rest, softmax)
        with without_unseen(it, window):
            got = backend.paged_attention(it.query, *rest, softmax)
        assert got.dtype == it.query.dtype and got.shape == it.query.shape
        want = formula(it, layer, scale, window, cap, sinks)
        # The mean of n values is about 1 / sqrt(n): a tolerance that is no share of a row's size
        # would let a long context lack keys.
        size = want.square().mean(-1, keepdim=True).sqrt()
        # A sink may leave a row next to nothing: float16 has no digits for it, and its weights
        # have none in float32.
        size += max(torch.finfo(it.pool.dtype).tiny, 1e-30)
        one = torch.zeros_like(want)
        torch.testing.assert_close((got - want) / (want.abs() + size), one, rtol=0, atol=tolerance)


def check_conversions(
    backend: Backend, held: torch.dtype, sent: torch.dtype, device: torch.device | str = "cpu"
) -> None:
    """Pack and unpack with conversions, bit for bit as the reference does."""
    for head_dim, block_size in ((16, 8), (80, 32)):
        pool = torch.randn(3, 2, 2, 2, block_size, head_dim, generator=torch.Generator()).to(held)
        # Ties, subnormal, too large for fp8, too large for fp16, infinite: each in its place.
        odd = [1.0625, 1.1875, 2.0**-10, 2.0**-9 * 1.5, 449.0, 465.0, 1e5, -1e5, math.inf, -0.0]
        pool.view(-1)[: len(odd)] = torch.tensor(odd).to(held)
        table, layers, tokens, heads = [2, 0, 1], range(2), range(3, 21), range(2)
        want = reference.pack_kv(pool, table, Rectangle(layers, heads, tokens), sent)
        got = backend.pack_kv(pool.to(device), table, Rectangle(layers, heads, tokens), sent).cpu()
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)
        pools = [torch.zeros_like(pool), torch.zeros_like(pool, device=device)]
        reference.unpack_kv(pools[0], table, Rectangle(layers, heads, tokens), want)
        backend.unpack_kv(pools[1], table, Rectangle(layers, heads, tokens), want.to(device))
        torch.testing.assert_close(pools[1].cpu(), pools[0], rtol=0, atol=0, equal_nan=True)


def check_moves(
    backend: Backend, dtype: torch.dtype, *, device: str = "cpu", is_far: bool = False
) -> None:
    """Append, pack and unpack, bit for bit as the reference does."""
    it = scene([(37, 37), (20, 2)], head_dim=64, dtype=dtype, is_far=is_far)
    wanted, got = sparse_pool(it.pool.shape, dtype), sparse_pool(it.pool.shape, dtype).to(device)

    def compare() -> None:
        assert torch.equal(wanted[it.first_block :], got[it.first_block :].cpu())

    values = torch.randn(len(it.batch.slots), 2, 2, 64).to(dtype)
    quarter_turn = torch.tensor([0.0, 1.0])[None, :, None].expand(len(values), 2, 32).contiguous()
    for layer, rotation in ((1, None), (2, quarter_turn)):
        turned = None if rotation is None else rotation.to(device)
        append(reference, wanted, layer, values, fresh(it.batch), rotation)
        append(backend, got, layer, values.to(device), fresh(it.batch), turned)
        compare()
    table, layers, tokens = it.batch.block_tables[0].tolist()[:3], range(1, 3), range(5, 36)
    for number, heads in enumerate((range(2), range(1), range(1, 2))):
        sent = reference.pack_kv(wanted, table, Rectangle(layers, heads, tokens), dtype)
        assert sent.any()
        assert torch.equal(
            sent, backend.pack_kv(got, table, Rectangle(layers, heads, tokens), dtype).cpu()
        )
        for pool, by in ((wanted, reference), (got, backend)):
            ones = torch.full_like(sent, number + 1.0).to(pool.device)
            by.unpack_kv(pool, table, Rectangle(layers, heads, tokens), ones)
        compare()


def heads_error(
    backend: Backend,
    dtype: torch.dtype,
    head_dim: int,
    num_tokens: int,
    heads: tuple[int, int],
    *,
    is_normed: bool,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> float:
    """Norm, rotate and append heads beside which there is NaN; compare with the formula in float64.

    Returns:
        The largest error of a query or key as a share of what rounding may do; infinite if a value
        is not where it belongs, or if anything else in the pool has changed.
    """
    generator = torch.Generator().manual_seed(seed)
    (num_heads, num_kv_heads), block_size = heads, 8
    num_rows, num_turned = num_heads + 2 * num_kv_heads, num_heads + num_kv_heads
    # Before the first token's heads, and behind each one's, lies what is not to be read.
    run = torch.full((num_tokens + 1, num_rows + num_heads, head_dim), math.nan, dtype=dtype)
    given = run.to(device)[1:, :num_rows]
    wide = torch.randn(given.shape, generator=generator, dtype=torch.float64)
    # Heads of very different length: another's mean would show, and eps is most of the last one's.
    wide *= torch.logspace(1, -3, num_rows, dtype=torch.float64)[:, None]
    given.copy_(wide)
    wide, weights = given.double().cpu(), torch.randn(num_turned, head_dim, generator=generator)
    positions = torch.randint(0, 9000, (num_tokens, 1), generator=generator)
    angles = positions / 10000 ** (torch.arange(head_dim // 2).double() / (head_dim // 2))
    rotation = torch.stack((angles.cos(), angles.sin()), dim=1).float()
    num_blocks = -(-num_tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    pool = torch.randn(num_blocks, 3, 2, num_kv_heads, block_size, head_dim, generator=generator)
    pool = pool.to(dtype)
    want, eps = pool.clone(), 1e-5
    none = torch.zeros(0, dtype=torch.int32)
    batch, there = PagedBatch(slots.int(), none, none, none), pool.to(device)
    rest = (given, rotation.to(device), there, 1, batch, weights.to(device) if is_normed else None)
    contract.check_heads(*rest)
    query = backend.rotate_and_append(*rest, eps)
    assert query.dtype == dtype and query.shape == (num_tokens, num_heads, head_dim)
    turned = wide[:, :num_turned]
    if is_normed:
        means = turned.square().mean(-1, keepdim=True)
        turned = turned / (means + eps).sqrt() * weights.double()
    x, y = turned.chunk(2, dim=-1)
    cosine, sine = rotation.double()[:, None].unbind(2)
    turned = torch.cat((x * cosine - y * sine, y * cosine + x * sine), dim=-1)
    where = slots // block_size, 1, slice(None), slice(None), slots % block_size
    got = torch.cat((query.cpu(), there.cpu()[where][:, 0]), dim=1)
    # What a difference of two products loses is a share of them; half the least float16 above 0.
    lost = 4e-7 * (x.abs() + y.abs()).repeat(1, 1, 2) + 2.0**-25
    shares = (got.double() - turned).abs() / (ROUNDING[dtype] * turned.abs() + lost)
    want[where] = torch.stack((got[:, num_heads:], given[:, num_turned:].cpu()), dim=1)
    if not torch.equal(want, there.cpu()):
        return math.inf
    return max(shares.nan_to_num(nan=math.inf).flatten().tolist(), default=0.0)


def fresh(batch: PagedBatch) -> PagedBatch:
    """Return the batch as it was before any backend kept something in it."""
    return PagedBatch(batch.slots, batch.query_starts, batch.context_lens, batch.block_tables)
