"""The host side of each kernel launch: the kernel, its grid and its arguments.

An operator becomes a list of `Launch`; `backend.py` launches them on the device, and tests run the
same kernels compiled for the CPU.  Without CUDA graphs every launch costs the time spent here, so
what the layers of a step have in common is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from kernels.contract import Activation, KernelError, PagedBatch, Rectangle, Softmax
from kernels.cuda import tiling
from kernels.cuda.pinned import upload

DTYPE_NAMES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
}
POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILED_DTYPES = (torch.bfloat16, torch.float16)
TILED_HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_HEAD_DIM = 256
LOG2_E = 1.4426950408889634


def struct(pointers: str, ints: str, floats: str = "") -> type[Structure]:
    """Return the type of a kernel's argument: its fields by kind, in the order of the source."""

    class Arguments(Structure):
        __slots__ = ()  # a misspelt field is an error, not an attribute that the kernel ignores
        _fields_ = [
            (name, kind)
            for names, kind in ((pointers, c_void_p), (ints, c_int), (floats, c_float))
            for name in names.split()
        ]

    return Arguments


# The structs of attention.cuh and kv.cu, field by field.
ATTENTION = struct(
    "query pool out parts tickets starts contexts tables work sinks",
    "num_heads num_kv_heads head_dim num_layers layer block_bits num_columns window",
    "scale cap",
)
HEADS = struct(
    "heads query pool slots rotation norm",
    "num_tokens num_heads num_kv_heads head_dim num_layers layer block_bits stride lanes",
    "eps",
)
MOVE = struct(
    "pool segment table",
    "num_kv_heads head_dim num_layers first_layer block_bits first_token num_tokens "
    "first_head num_moved_heads",
)
# The structs of rowwise.cu, field by field.
NORM = struct("x y weight out", "size", "eps")
GATE = struct("gate_up out", "rows size", "linear cubic limit shift")
# The launch bounds of kv.cu and rowwise.cu.
HEADS_THREADS = 128
MAX_NORM_THREADS = 512
MAX_GATE_THREADS = 256
WIDE_BYTES = 16
_WARP = 32


class Launch(NamedTuple):
    """One kernel launch.

    Attributes:
        source: "attention", "kv" or another file of csrc/.
        kernel: the instantiation, by its C++ name.
        grid: thread blocks by x and y.
        threads: threads of a thread block.
        shared_bytes: dynamic shared memory of a thread block.
        arguments: the struct that is passed to the kernel.
        keep: the tensors to which it points, which must live until the kernel has run.
    """

    source: str
    kernel: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    arguments: Structure
    keep: tuple[torch.Tensor, ...] = ()


class Planned(NamedTuple):
    """The work items of one tile in a step, and the device memory that their launch needs.

    Attributes:
        items: `work.items` on the device.
        parts: [slots * Hkv, tile rows, D + 4] float32, a buffer for partial results.
        tickets: [slots * Hkv] int32, how many parts of a tile are written; a launch leaves 0 there.
    """

    tile: tiling.AnyTile
    work: tiling.Work
    items: torch.Tensor
    parts: torch.Tensor
    tickets: torch.Tensor


@dataclass(slots=True)
class OnDevice:
    """The parts of a batch that were uploaded or planned once for all its layers.

    Attributes:
        tensors: tensors of the batch on the device, by name: "slots", "starts", ...
        works: the work items of attention, by window and number of query heads.
        attending: the launches of attention without the fields that differ between layers.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    works: dict[tuple[int | None, int], list[Planned]] = field(default_factory=dict)
    attending: dict[tuple[object, ...], list[Launch]] = field(default_factory=dict)


def check_pool(pool: torch.Tensor) -> None:
    """Raise KernelError unless the CUDA kernels support this pool."""
    _check_shape(pool.shape, pool.dtype)
    if not pool.is_contiguous():
        raise KernelError("the pool is not contiguous")


@cache
def _check_shape(shape: torch.Size, dtype: torch.dtype) -> None:
    block_size, head_dim = shape[4:]
    if dtype not in POOL_DTYPES:
        raise KernelError(f"the pool is {dtype}, not float32, bfloat16 or float16")
    if block_size < 8 or block_size & (block_size - 1):
        raise KernelError(f"block_size is {block_size}, not a power of two from 8")
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise KernelError(f"head_dim is {head_dim}, not a multiple of 8 up to {MAX_HEAD_DIM}")


def rotate_and_append(
    heads: torch.Tensor,
    rotation: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    query: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> list[Launch]:
    """Return the launch that norms and rotates a step's heads, and writes them.

    Queries are written to `query`, keys and values to their slots in the pool.

    Args:
        heads: [T, Hq + 2 Hkv, D]; the heads of a token are contiguous, and begin at a multiple of
            16 bytes.
        rotation: [T, 2, D / 2] float32; `norm` is [Hq + Hkv, D] float32.
        query: [T, Hq, D].

    Raises:
        KernelError: A tensor has another dtype or other strides, or `check_pool` rejects the pool.
    """
    check_pool(pool)
    num_tokens, num_rows, head_dim = heads.shape
    stride, *inner = heads.stride()
    if heads.dtype != pool.dtype or inner != [head_dim, 1]:
        found = f"{heads.dtype} with strides {heads.stride()}"
        raise KernelError(f"heads are {found}, not {pool.dtype} as the pool, a token's in one run")
    if (heads.data_ptr() | stride * heads.itemsize) % WIDE_BYTES:
        raise KernelError(f"heads of a token do not begin at a multiple of {WIDE_BYTES} bytes")
    floats = {"rotation": rotation} | ({} if norm is None else {"norm": norm})
    for name, it in floats.items():
        _check_rows(torch.float32, it.shape, {name: it})
    if not num_tokens:
        return []
    tensors = floats | {"heads": heads, "query": query, "pool": pool}
    tensors["slots"] = _on_device(batch, pool, "slots", batch.slots)
    half = head_dim // 2
    width = min(WIDE_BYTES // heads.itemsize, half & -half)
    lanes = 1 << (half // width - 1).bit_length()
    arguments = _arguments(HEADS, pool)
    arguments.num_tokens, arguments.num_heads = num_tokens, query.shape[1]
    arguments.layer, arguments.stride = layer, stride
    arguments.lanes, arguments.eps = lanes, eps
    point(arguments, **tensors)
    kernel = f"rotate_and_append<{DTYPE_NAMES[pool.dtype]},{width}>"
    grid = (-(-num_tokens * num_rows * lanes // HEADS_THREADS), 1)
    return [Launch("kv", kernel, grid, HEADS_THREADS, 0, arguments, tuple(tensors.values()))]


def move(
    pool: torch.Tensor,
    block_table: Sequence[int] | torch.Tensor,
    rectangle: Rectangle,
    segment: torch.Tensor,
    *,
    into_pool: bool,
) -> list[Launch]:
    """Return the launch that copies a rectangle between a sequence's blocks and a segment.

    Args:
        block_table: It is uploaded, unless it is int32 on the pool's device already.
        segment: [l, 2, h, t, D], contiguous and on the same device, of any dtype of `DTYPE_NAMES`;
            values are converted.

    Raises:
        KernelError: The kernel does not support this pool or segment.
    """
    check_pool(pool)
    if segment.dtype not in DTYPE_NAMES:
        raise KernelError(f"the segment is {segment.dtype}, not float32, 16-bit or float8_e4m3fn")
    assert segment.is_contiguous(), "the kernel takes a segment as one run"
    table = block_table
    if not isinstance(table, torch.Tensor):
        table = torch.tensor(table, dtype=torch.int32, device=pool.device)
    arguments, (layers, heads, tokens) = _arguments(MOVE, pool), rectangle
    arguments.first_layer = layers.start
    arguments.first_head, arguments.num_moved_heads = heads.start, len(heads)
    arguments.first_token, arguments.num_tokens = tokens.start, len(tokens)
    point(arguments, pool=pool, segment=segment, table=table)
    names = f"{DTYPE_NAMES[pool.dtype]},{DTYPE_NAMES[segment.dtype]}"
    kernel = f"move<{names},{str(into_pool).lower()}>"
    grid = (-(-len(tokens) * (pool.shape[5] // 8) // 128), len(layers) * 2 * len(heads))
    return [Launch("kv", kernel, grid, 128, 0, arguments, (pool, segment, table))]


def attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    softmax: Softmax,
    out: torch.Tensor,
    gpu: tiling.Gpu,
) -> list[Launch]:
    """Return the launches that compute `kernels.paged_attention` over a layer of the pool.

    There are up to two: one with the tile for sequences of few rows, one with that for many.

    Args:
        query: [T, Hq, D] in the pool's dtype, contiguous; so is `out`.
        gpu: The device's properties, which decide tiles and splits.

    Raises:
        KernelError: The kernels do not support this pool or query, or `scale` is not above 0.
    """
    if query.dtype != pool.dtype or not query.is_contiguous():
        raise KernelError(f"query is {query.dtype}, not a contiguous {pool.dtype} as the pool is")
    attending = batch.scratch.of(OnDevice).attending
    key = pool.shape, pool.dtype, query.shape[1], *softmax[:3]
    if (common := attending.get(key)) is None:
        common = attending[key] = _attending(pool, batch, query.shape, softmax, gpu)
    own = {"query": query, "pool": pool, "out": out}
    if softmax.sinks is not None:
        own["sinks"] = softmax.sinks
    launches = []
    for source, kernel, grid, threads, shared, fields, keep in common:
        arguments = _copy(fields)
        arguments.layer = layer
        point(arguments, **own)
        keep = (*keep, *own.values())
        launches.append(Launch(source, kernel, grid, threads, shared, arguments, keep))
    return launches


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    y: torch.Tensor | None = None,
) -> list[Launch]:
    """Return the launch out = x / sqrt(mean(x^2) + eps) * weight; with `y`, x += y comes first.

    Args:
        x: [..., K]; `y` and `out` have its shape and dtype; `weight` is [K] float32.

    Raises:
        KernelError: A tensor has another shape or dtype, or is not contiguous.
    """
    rows = {"x": x, "out": out} | ({} if y is None else {"y": y})
    dtype, shape = x.dtype, x.shape
    _check_rows(dtype, shape, rows)
    _check_rows(torch.float32, shape[-1:], {"weight": weight})
    if not shape.numel():
        return []
    tensors, size = rows | {"weight": weight}, shape[-1]
    arguments = NORM(size=size, eps=eps)
    width = _width(size, dtype, point(arguments, **tensors))
    threads = _threads(size // width, MAX_NORM_THREADS)
    kernel, grid = f"rms_norm<{DTYPE_NAMES[dtype]},{width}>", (shape.numel() // size, 1)
    shared = threads // _WARP * weight.itemsize
    return [Launch("rowwise", kernel, grid, threads, shared, arguments, tuple(tensors.values()))]


def gate(
    gate_up: torch.Tensor, out: torch.Tensor, activation: Activation, *, wanted_blocks: int
) -> list[Launch]:
    """Return the launch out = activation(gate) * up.

    Args:
        gate_up: [..., 2 K]: gate first, then up; `out` is [..., K] of the same dtype.
        wanted_blocks: How many thread blocks fill the device; a block may compute several rows.

    Raises:
        KernelError: A tensor has another shape or dtype, or is not contiguous.
    """
    dtype, shape = out.dtype, out.shape
    *outer, size = shape
    _check_rows(dtype, shape, {"out": out})
    _check_rows(dtype, torch.Size((*outer, 2 * size)), {"gate_up": gate_up})
    if not shape.numel():
        return []
    rows = shape.numel() // size
    arguments = GATE(rows=rows, size=size, **activation._asdict())
    width = _width(size, dtype, point(arguments, gate_up=gate_up, out=out))
    threads = _threads(size // width, MAX_GATE_THREADS)
    across = -(-(size // width) // threads)
    grid = (across, min(rows, -(-wanted_blocks // across)))
    kernel = f"gate<{DTYPE_NAMES[dtype]},{width}>"
    return [Launch("rowwise", kernel, grid, threads, 0, arguments, (gate_up, out))]


def _attending(
    pool: torch.Tensor, batch: PagedBatch, query: torch.Size, softmax: Softmax, gpu: tiling.Gpu
) -> list[Launch]:
    """Return a step's launches of attention without the fields that differ between layers."""
    check_pool(pool)
    scale, window, cap, _ = softmax
    if not scale > 0:
        raise KernelError(f"scale is {scale}, not above 0")
    arguments, (num_tokens, num_heads, head_dim) = _arguments(ATTENTION, pool), query
    starts = _on_device(batch, pool, "starts", batch.query_starts)
    contexts = _on_device(batch, pool, "contexts", batch.context_lens)
    tables = _on_device(batch, pool, "tables", batch.block_tables.contiguous())
    arguments.num_heads, arguments.num_columns = num_heads, tables.shape[1]
    arguments.window = window or 0
    arguments.scale, arguments.cap = scale * LOG2_E, (cap or 0.0) * LOG2_E
    point(arguments, starts=starts, contexts=contexts, tables=tables)
    name, of_batch = DTYPE_NAMES[pool.dtype], (starts, contexts, tables)
    if not is_tiled(pool.dtype, head_dim):
        kernel, grid = f"attend_plain<{name}>", (num_tokens, num_heads)
        return [Launch("attention", kernel, grid, 32, 0, arguments, of_batch)]
    works, key = batch.scratch.of(OnDevice).works, (window, num_heads)
    if key not in works:
        works[key] = _works(num_heads, pool, batch, window, gpu)
    launches = []
    for tile, work, items, parts, tickets in works[key]:
        mine = _copy(arguments)
        point(mine, work=items, parts=parts, tickets=tickets)
        (source, kernel), shared = tile.kernel(name, head_dim), tile.shared_bytes(head_dim)
        grid, keep = (len(work.items), pool.shape[3]), (*of_batch, items, parts, tickets)
        launches.append(Launch(source, kernel, grid, tile.threads, shared, mine, keep))
    return launches


def _works(
    num_heads: int, pool: torch.Tensor, batch: PagedBatch, window: int | None, gpu: tiling.Gpu
) -> list[Planned]:
    """Plan the work items of a step: sequences of few rows, and those of many."""
    starts, contexts = batch.query_starts.numpy(), batch.context_lens.numpy()
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    group = num_heads // num_kv_heads
    few, many = tiling.few_rows_tile(head_dim), tiling.many_rows_tile(head_dim, gpu)
    is_few = np.diff(starts) * group <= few.rows
    planned = []
    for tile, chosen in ((few, is_few), (many, ~is_few)):
        work = tiling.work(
            starts,
            contexts,
            np.flatnonzero(chosen),
            group=group,
            num_kv_heads=num_kv_heads,
            tile=tile,
            window=window,
            wanted_blocks=gpu.wanted_blocks(tile, head_dim),
        )
        if len(work.items):
            planned.append(on_device(tile, work, pool))
    return planned


def on_device(tile: tiling.AnyTile, work: tiling.Work, pool: torch.Tensor) -> Planned:
    """Upload a tile schedule; allocate its partial results and completion counters."""
    num_kv_heads, head_dim, device = pool.shape[3], pool.shape[5], pool.device
    tickets = torch.zeros(work.num_slots * num_kv_heads, dtype=torch.int32, device=device)
    (items,) = upload([work.items], device)
    return Planned(
        tile,
        work,
        items,
        torch.empty((len(tickets), tile.rows, head_dim + 4), dtype=torch.float32, device=device),
        tickets,
    )


def is_tiled(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether tensor cores compute attention of this dtype and head size."""
    return dtype in TILED_DTYPES and head_dim in TILED_HEAD_DIMS


def _arguments(layout: type[Structure], pool: torch.Tensor) -> Structure:
    """Return a kernel's argument with the sizes of a pool."""
    return _copy(_with_sizes(layout, pool.shape))


@cache
def _with_sizes(layout: type[Structure], pool: torch.Size) -> Structure:
    arguments = layout()
    _, arguments.num_layers, _, arguments.num_kv_heads, block_size, arguments.head_dim = pool
    arguments.block_bits = block_size.bit_length() - 1
    return arguments


def _copy(arguments: Structure) -> Structure:
    return type(arguments).from_buffer_copy(arguments)


def point(arguments: Structure, **tensors: torch.Tensor) -> int:
    """Set the fields with these names to the tensors' addresses; return all addresses, or-ed."""
    bits = 0
    for name, tensor in tensors.items():
        at = tensor.data_ptr()
        setattr(arguments, name, at)
        bits |= at
    return bits


def _on_device(
    batch: PagedBatch, pool: torch.Tensor, name: str, tensor: torch.Tensor
) -> torch.Tensor:
    """Return a tensor of the batch on the device, uploaded once for all layers."""
    tensors = batch.scratch.of(OnDevice).tensors
    if name not in tensors:
        (tensors[name],) = upload([tensor.numpy()], pool.device)
    return tensors[name]


def _width(size: int, dtype: torch.dtype, bits: int) -> int:
    """Return how many values a thread can load at once from every row of every tensor.

    Args:
        bits: The addresses of all tensors, or-ed by `point`.
    """
    width = WIDE_BYTES // dtype.itemsize
    return 1 if bits % WIDE_BYTES or size % width else width


def _threads(num_wide: int, most: int) -> int:
    return min(most, -(-num_wide // _WARP) * _WARP)


def _check_rows(dtype: torch.dtype, shape: torch.Size, tensors: dict[str, torch.Tensor]) -> None:
    if dtype not in POOL_DTYPES:
        raise KernelError(f"the rows are {dtype}, not float32, bfloat16 or float16")
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.shape != shape:
            raise KernelError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}"
            )
        if not tensor.is_contiguous():
            raise KernelError(f"{name} is not contiguous: give it as one run of rows")
