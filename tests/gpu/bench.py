"""What the kernels reach, and the limits of the machine in the same run.

Rates count the bytes or operations that the task needs, not those a kernel happens to move: keys
and values once for attention, every byte once read and once written for a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.cuda import backend as cuda
from kernels.cuda import launch, staging
from kernels.cuda.staging import SIZES, Way
from tests.gpu.inputs import Paged, batch_of
from tests.gpu.settings import Part, Settings, lane_of
from tests.gpu.timing import device_s, launch_s, replay_s, wall_s
from tests.gpu.trail import Figures

Call = Callable[[], object]
BF16 = torch.bfloat16
GIB = 1 << 30
# (query heads, KV heads, dimensions): of prompts, and GQA 8 for generation.
PROMPT_HEADS = (32, 8, 128)
DECODE_HEADS = (32, 4, 128)
BLOCK_SIZE = 16


def limit_parts(settings: Settings) -> dict[str, Part]:
    """The device's copy and read rates, its matrix rate, and DMA to and from pinned memory."""
    return {"memory": _memory, "matmul": _matmul, "dma": _dma}


def kernel_parts(settings: Settings) -> dict[str, Part]:
    """Each row of the table that one kernel makes."""
    lens = {"long": [(8192, 1)] * 64, "short": [(1024, 1)] * 16}
    parts: dict[str, Part] = {f"decode {name}": partial(_decode, name, lens[name]) for name in lens}
    parts |= {f"prefill {k}k": partial(_prefill, k) for k in (8, 16)}
    return parts | {"pack and unpack": _pack}


def staging_parts(settings: Settings) -> dict[str, Part]:
    """KV to and from pinned memory: each way by size, and a large one against DMA."""
    return {
        "staged": partial(_staged, settings),
        "ways out": partial(_ways, settings, "out"),
        "ways back": partial(_ways, settings, "back"),
    }


def launch_parts(settings: Settings) -> dict[str, Part]:
    """What a launch costs Python, and what is left of it in a graph."""
    return {kernel: partial(_launch, kernel) for kernel in ("attend", "append", "move", "rms_norm")}


def pages(lens: list[tuple[int, int]], heads: tuple[int, int, int], num_layers: int = 1) -> Paged:
    """Make (context, queries) sequences in permuted blocks of a random bf16 pool."""
    num_heads, num_kv_heads, head_dim = heads
    counts = [-(-context // BLOCK_SIZE) for context, _ in lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    pool_shape = (sum(counts), num_layers, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    pool = torch.randn(pool_shape, dtype=BF16, device="cuda")
    num_tokens = sum(queries for _, queries in lens)
    query = torch.randn(num_tokens, num_heads, head_dim, dtype=BF16, device="cuda")
    return Paged(pool, batch_of(lens, tables, BLOCK_SIZE), query, [], tables)


def flops(length: int) -> float:
    """Return the operations of causal attention over one prompt with PROMPT_HEADS."""
    return 4 * PROMPT_HEADS[0] * PROMPT_HEADS[2] * length * length / 2


def _memory() -> Figures:
    free_bytes, _ = torch.cuda.mem_get_info()
    source = torch.empty(min(4 * GIB, free_bytes // 4), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_s = device_s(lambda: target.copy_(source))
    read_s = device_s(lambda: source.view(torch.int64).sum())
    return {"copy_gbs": 2 * source.nbytes / copy_s / 1e9, "read_gbs": source.nbytes / read_s / 1e9}


def _matmul() -> Figures:
    left = torch.randn(8192, 8192, dtype=BF16, device="cuda")  # zeros would draw less power
    right = torch.randn_like(left)
    return {"matmul_tflops": 2 * 8192**3 / device_s(lambda: left @ right) / 1e12}


def _dma() -> Figures:
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda").random_()
    out_s = device_s(lambda: host.copy_(device, non_blocking=True))
    back_s = device_s(lambda: device.copy_(host, non_blocking=True))
    return {"d2h_gbs": GIB / out_s / 1e9, "h2d_gbs": GIB / back_s / 1e9}


def _decode(name: str, lens: list[tuple[int, int]]) -> Figures:
    it = pages(lens, DECODE_HEADS)
    num_bytes = it.pool.nbytes
    seconds = device_s(lambda: _attend(it))
    return {f"decode_{name}_gbs": num_bytes / seconds / 1e9, f"decode_{name}_us": seconds * 1e6}


def _prefill(kilo: int) -> Figures:
    length = kilo << 10
    it = pages([(length, length)], PROMPT_HEADS)
    seconds = device_s(lambda: _attend(it), repeats=7)
    return {f"prefill_{kilo}k_tflops": flops(length) / seconds / 1e12}


def _pack() -> Figures:
    it = pages([(16_384, 1)], PROMPT_HEADS, num_layers=16)
    out, back = _moves(it, range(16), range(it.pool.shape[3]), range(16_384))
    moved = 2 * it.pool.nbytes / 1e9
    return {"pack_gbs": moved / device_s(out), "unpack_gbs": moved / device_s(back)}


def _moves(it: Paged, *rectangle: range) -> tuple[Call, Call]:
    """Return the kernels out and back alone: their block table is uploaded before."""
    layers, heads, tokens = rectangle
    segment = torch.zeros(staging.segment_shape(it.pool, *rectangle), dtype=BF16, device="cuda")
    arguments = (it.pool, it.tables[0], layers, heads, tokens, segment)
    out, back = (launch.move(*arguments, into_pool=into_pool) for into_pool in (False, True))
    return partial(cuda.start, it.pool.device, out), partial(cuda.start, it.pool.device, back)


def _staged(settings: Settings) -> Figures:
    it, lane = pages([(4096, 1)], PROMPT_HEADS, num_layers=16), lane_of(settings, BF16)
    rectangle = (range(16), range(it.pool.shape[3]), range(4096))
    pack = partial(staging.pack, Way.STAGED, lane, it.pool, it.tables[0], *rectangle)
    lane.mark()
    num_bytes = pack().nbytes
    return {"pack_pinned_gbs": num_bytes / wall_s(pack) / 1e9, "pack_pinned_bytes": num_bytes}


def _ways(settings: Settings, direction: str) -> Figures:
    it, lane = pages([(4096, 1)], PROMPT_HEADS, num_layers=16), lane_of(settings, BF16)
    figures: Figures = {}
    lane.mark()
    for size in SIZES:
        rectangle = staging.rectangle_of(size, it.pool)
        segment = torch.zeros(staging.segment_shape(it.pool, *rectangle), dtype=BF16)
        for way in Way:
            if direction == "out":
                copy = partial(staging.pack, way, lane, it.pool, it.tables[0], *rectangle)
                seconds = wall_s(copy)
            else:
                back = partial(staging.unpack, way, lane, it.pool, it.tables[0], *rectangle)
                seconds = wall_s(partial(back, segment))
            figures[f"{direction}_{size >> 10}k_{way.value}_gbs"] = segment.nbytes / seconds / 1e9
    return figures


def _launch(kernel: str) -> Figures:
    it = pages([(64, 1)] * 4, DECODE_HEADS)
    values = torch.randn(4, 2, *DECODE_HEADS[1:], dtype=BF16, device="cuda")
    rows, weight = torch.zeros(4, 4096, dtype=BF16, device="cuda"), values.new_ones(4096)
    calls: dict[str, Call] = {
        "attend": lambda: _attend(it),
        "append": lambda: cuda.append_kv(it.pool, 0, values, it.batch),
        "move": _moves(it, range(1), range(64))[0],
        "rms_norm": lambda: cuda.add_rms_norm(rows, rows, weight, 1e-5),
    }
    call = calls[kernel]
    return {f"launch_{kernel}_us": launch_s(call) * 1e6, f"graph_{kernel}_us": replay_s(call) * 1e6}


def _attend(it: Paged) -> torch.Tensor:
    return cuda.paged_attention(it.query, it.pool, 0, it.batch, it.query.shape[2] ** -0.5, None)
