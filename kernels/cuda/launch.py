"""Which kernel, on how many thread blocks, with which arguments: all that is decided on the host.

An operator becomes a list of `Launch`; `backend.py` gives them to the device, the tests to the
same kernels compiled for the CPU.  Pointers are integers: the caller keeps the tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.contract import Activation, KernelError, PagedBatch
from kernels.cuda import tiling

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


def struct(pointers: str, ints: str, floats: str = "") -> np.dtype[np.void]:
    """Return the layout of a kernel's argument: its fields by kind, in the order of the source."""
    fields: list[tuple[str, type[np.generic]]] = [(name, np.uint64) for name in pointers.split()]
    fields += [(name, np.int32) for name in ints.split()]
    fields += [(name, np.float32) for name in floats.split()]
    return np.dtype(fields, align=True)


# The structs of attention.cu and kv.cu, field by field.
ATTENTION = struct(
    "query pool out parts tickets starts contexts tables work sinks",
    "num_heads num_kv_heads head_dim num_layers layer block_bits num_columns window",
    "scale cap",
)
APPEND = struct(
    "key_value pool slots rotation",
    "num_kv_heads head_dim num_layers layer block_bits",
)
MOVE = struct(
    "pool segment table",
    "num_kv_heads head_dim num_layers first_layer block_bits first_token num_tokens "
    "first_head num_moved_heads",
)
# The structs of rowwise.cu, field by field.
NORM = struct("x y weight out", "size", "eps")
GATE = struct("gate_up out", "rows size", "linear cubic limit shift")
# The launch bounds of rowwise.cu.
MAX_NORM_THREADS = 512
MAX_GATE_THREADS = 256
WIDE_BYTES = 16
_WARP = 32


class Launch(NamedTuple):
    """One kernel to start.

    Attributes:
        source: "attention", "kv" or "rowwise", a file of csrc/.
        kernel: the instantiation, as C++ names it.
        arguments: [1] of the kernel's struct.
        keep: tensors that must live until the kernel has run.
    """

    source: str
    kernel: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    arguments: npt.NDArray[np.void]
    keep: tuple[torch.Tensor, ...] = ()


class Planned(NamedTuple):
    """One tile's part of a step: what its thread blocks do, and where that lies on the device.

    Attributes:
        items: `work.items` there.
        parts: float32, room for partial results.
        tickets: int32, counts of those that are there; every launch leaves them at 0.
    """

    tile: tiling.Tile
    work: tiling.Work
    items: torch.Tensor
    parts: torch.Tensor
    tickets: torch.Tensor


@dataclass(slots=True)
class OnDevice:
    """What of a batch lies on the device: its tensors by name, work by window and query heads."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    works: dict[tuple[int | None, int], list[Planned]] = field(default_factory=dict)


def check_pool(pool: torch.Tensor) -> None:
    """Raise KernelError unless the CUDA kernels can serve such a pool."""
    block_size, head_dim = pool.shape[4:]
    if pool.dtype not in POOL_DTYPES:
        raise KernelError(f"the pool is {pool.dtype}, not float32, bfloat16 or float16")
    if block_size < 8 or block_size & (block_size - 1):
        raise KernelError(f"block_size is {block_size}, not a power of two from 8")
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise KernelError(f"head_dim is {head_dim}, not a multiple of 8 up to {MAX_HEAD_DIM}")
    if not pool.is_contiguous():
        raise KernelError("the pool is not contiguous")


def append(
    pool: torch.Tensor,
    layer: int,
    key_value: torch.Tensor,
    batch: PagedBatch,
    rotation: torch.Tensor | None = None,
) -> list[Launch]:
    """Write a step's K and V, K rotated by [T, 2, D / 2] cosines and sines if they are given."""
    check_pool(pool)
    key_value = key_value.to(pool.dtype).contiguous()
    arguments = _arguments(APPEND, pool)
    slots = _on_device(batch, pool, "slots", batch.slots)
    arguments["layer"] = layer
    keep = [key_value, slots]
    point(arguments, key_value=key_value, pool=pool, slots=slots)
    if rotation is not None:
        rotation = rotation.contiguous()
        point(arguments, rotation=rotation)
        keep.append(rotation)
    kernel = f"append<{DTYPE_NAMES[pool.dtype]}>"
    grid = (key_value.shape[0], 1)
    return [Launch("kv", kernel, grid, 128, 0, arguments, tuple(keep))] if grid[0] else []


def move(
    pool: torch.Tensor,
    block_table: Sequence[int] | torch.Tensor,
    layers: range,
    heads: range,
    tokens: range,
    segment: torch.Tensor,
    *,
    into_pool: bool,
) -> list[Launch]:
    """Copy a rectangle between a sequence's blocks and a contiguous segment on one device.

    The block table is uploaded, unless it is int32 on the pool's device already.
    """
    check_pool(pool)
    if segment.dtype not in DTYPE_NAMES:
        raise KernelError(f"the segment is {segment.dtype}, not float32, 16-bit or float8_e4m3fn")
    assert segment.is_contiguous(), "the kernel takes a segment as one run"
    table = block_table
    if not isinstance(table, torch.Tensor):
        table = torch.tensor(table, dtype=torch.int32, device=pool.device)
    arguments = _arguments(MOVE, pool)
    arguments["first_layer"] = layers.start
    arguments["first_head"], arguments["num_moved_heads"] = heads.start, len(heads)
    arguments["first_token"], arguments["num_tokens"] = tokens.start, len(tokens)
    point(arguments, pool=pool, segment=segment, table=table)
    names = f"{DTYPE_NAMES[pool.dtype]},{DTYPE_NAMES[segment.dtype]}"
    kernel = f"move<{names},{str(into_pool).lower()}>"
    grid = (-(-len(tokens) * (pool.shape[5] // 8) // 128), len(layers) * 2 * len(heads))
    return [Launch("kv", kernel, grid, 128, 0, arguments, (segment, table))]


def attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    gpu: tiling.Gpu,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> list[Launch]:
    """Attend with few and with many rows.

    Raises:
        KernelError: No kernel serves such a pool or query, or `scale` is not above 0.
    """
    check_pool(pool)
    if not scale > 0:
        raise KernelError(f"scale is {scale}, not above 0")
    if query.dtype != pool.dtype or not query.is_contiguous():
        raise KernelError(f"query is {query.dtype}, not a contiguous {pool.dtype} as the pool is")
    arguments = _arguments(ATTENTION, pool)
    starts = _on_device(batch, pool, "starts", batch.query_starts)
    contexts = _on_device(batch, pool, "contexts", batch.context_lens)
    tables = _on_device(batch, pool, "tables", batch.block_tables.contiguous())
    arguments["num_heads"], arguments["num_columns"] = query.shape[1], tables.shape[1]
    arguments["layer"], arguments["window"] = layer, window or 0
    arguments["scale"], arguments["cap"] = scale * LOG2_E, (cap or 0.0) * LOG2_E
    point(arguments, query=query, pool=pool, out=out)
    own = [query, out]
    if sinks is not None:
        point(arguments, sinks=sinks)
        own.append(sinks)
    point(arguments, starts=starts, contexts=contexts, tables=tables)
    name, head_dim = DTYPE_NAMES[query.dtype], query.shape[2]
    if not is_tiled(query.dtype, head_dim):
        grid = (query.shape[0], query.shape[1])
        return [Launch("attention", f"attend_plain<{name}>", grid, 32, 0, arguments, tuple(own))]
    works, key = batch.scratch.of(OnDevice).works, (window, query.shape[1])
    if key not in works:
        works[key] = _works(query, pool, batch, window, gpu)
    launches = []
    for tile, work, items, parts, tickets in works[key]:
        mine = arguments.copy()
        point(mine, work=items, parts=parts, tickets=tickets)
        keep = (*own, items, parts, tickets)
        kernel, shared = attend_name(name, head_dim, tile), tile.shared_bytes(head_dim)
        grid = (len(work.items), pool.shape[3])
        launches.append(Launch("attention", kernel, grid, tile.threads, shared, mine, keep))
    return launches


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    y: torch.Tensor | None = None,
) -> list[Launch]:
    """Make out = x / sqrt(mean(x^2) + eps) * weight; with `y`, x += y in place before that.

    Args:
        x: [..., K]; `y` and `out` likewise, all of one dtype; `weight` [K] float32.

    Raises:
        KernelError: A tensor is not of that shape and dtype, or is not contiguous.
    """
    rows = {"x": x, "out": out} | ({} if y is None else {"y": y})
    tensors, size = rows | {"weight": weight}, x.shape[-1]
    _check_rows(x.dtype, rows, dict.fromkeys(rows, x.shape))
    _check_rows(torch.float32, {"weight": weight}, {"weight": x.shape[-1:]})
    if not x.numel():
        return []
    width = _width(size, *tensors.values())
    arguments = np.zeros(1, NORM)
    arguments["size"], arguments["eps"] = size, eps
    point(arguments, **tensors)
    threads = _threads(size // width, MAX_NORM_THREADS)
    kernel, grid = f"rms_norm<{DTYPE_NAMES[x.dtype]},{width}>", (x.numel() // size, 1)
    shared = threads // _WARP * np.dtype(np.float32).itemsize
    return [Launch("rowwise", kernel, grid, threads, shared, arguments, tuple(tensors.values()))]


def gate(
    gate_up: torch.Tensor, out: torch.Tensor, activation: Activation, *, wanted_blocks: int
) -> list[Launch]:
    """Make out = activation(gate) * up.

    Args:
        gate_up: [..., 2 K]: gate first, then up; `out` [..., K] of the same dtype.
        wanted_blocks: How many thread blocks fill the device; more rows are taken in turns.

    Raises:
        KernelError: A tensor is not of that shape and dtype, or is not contiguous.
    """
    shape = torch.Size((*out.shape[:-1], 2 * out.shape[-1]))
    _check_rows(out.dtype, {"out": out, "gate_up": gate_up}, {"out": out.shape, "gate_up": shape})
    if not out.numel():
        return []
    size = out.shape[-1]
    rows, width = out.numel() // size, _width(size, gate_up, out)
    arguments = np.zeros(1, GATE)
    arguments["rows"], arguments["size"] = rows, size
    for name, value in activation._asdict().items():
        arguments[name] = value
    point(arguments, gate_up=gate_up, out=out)
    threads = _threads(size // width, MAX_GATE_THREADS)
    across = -(-(size // width) // threads)
    grid = (across, min(rows, -(-wanted_blocks // across)))
    kernel = f"gate<{DTYPE_NAMES[out.dtype]},{width}>"
    return [Launch("rowwise", kernel, grid, threads, 0, arguments, (gate_up, out))]


def _works(
    query: torch.Tensor,
    pool: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    gpu: tiling.Gpu,
) -> list[Planned]:
    """Plan the step, for sequences of few rows and for those of many."""
    starts, contexts = batch.query_starts.numpy(), batch.context_lens.numpy()
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    group = query.shape[1] // num_kv_heads
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


def on_device(tile: tiling.Tile, work: tiling.Work, pool: torch.Tensor) -> Planned:
    """Upload work, and make room for its partial results."""
    num_kv_heads, head_dim, device = pool.shape[3], pool.shape[5], pool.device
    tickets = torch.zeros(work.num_slots * num_kv_heads, dtype=torch.int32, device=device)
    return Planned(
        tile,
        work,
        torch.from_numpy(work.items).to(device),
        torch.empty((len(tickets), tile.rows, head_dim + 4), dtype=torch.float32, device=device),
        tickets,
    )


def is_tiled(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether tensor cores compute attention of this dtype and head size."""
    return dtype in TILED_DTYPES and head_dim in TILED_HEAD_DIMS


def attend_name(dtype: str, head_dim: int, tile: tiling.Tile) -> str:
    """Return the instantiation for a tile, as C++ names it."""
    return f"attend<{dtype},{head_dim},{','.join(map(str, tile))}>"


def _arguments(struct: np.dtype[np.void], pool: torch.Tensor) -> npt.NDArray[np.void]:
    arguments = np.zeros(1, struct)
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    arguments["num_layers"], arguments["num_kv_heads"] = num_layers, num_kv_heads
    arguments["head_dim"], arguments["block_bits"] = head_dim, block_size.bit_length() - 1
    return arguments


def point(arguments: npt.NDArray[np.void], **tensors: torch.Tensor) -> None:
    """Write where tensors lie into the fields of their names."""
    for name, tensor in tensors.items():
        arguments[name] = tensor.data_ptr()


def _on_device(
    batch: PagedBatch, pool: torch.Tensor, name: str, tensor: torch.Tensor
) -> torch.Tensor:
    """Upload a tensor of the batch once for all layers."""
    tensors = batch.scratch.of(OnDevice).tensors
    if name not in tensors:
        tensors[name] = tensor.to(pool.device)
    return tensors[name]


def _width(size: int, *tensors: torch.Tensor) -> int:
    """Return how many values every row of every tensor lets a thread load at once."""
    width = WIDE_BYTES // tensors[0].itemsize
    aligned = all(tensor.data_ptr() % WIDE_BYTES == 0 for tensor in tensors)
    return width if aligned and size % width == 0 else 1


def _threads(num_wide: int, most: int) -> int:
    return min(most, -(-num_wide // _WARP) * _WARP)


def _check_rows(
    dtype: torch.dtype, tensors: dict[str, torch.Tensor], shapes: dict[str, torch.Size]
) -> None:
    if dtype not in POOL_DTYPES:
        raise KernelError(f"the rows are {dtype}, not float32, bfloat16 or float16")
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.shape != shapes[name]:
            raise KernelError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shapes[name])}"
            )
        if not tensor.is_contiguous():
            raise KernelError(f"{name} is not contiguous: give it as one run of rows")
