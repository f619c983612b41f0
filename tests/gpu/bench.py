"""Measures the kernels, and the limits of the machine in the same run.

Rates count the bytes or operations that the task needs, not those a kernel happens to move: keys
and values once for attention, every byte once read and once written for a copy.  Where inputs are
small (`Settings.size`) every part runs, and its figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.contract import SILU, Backend, Rectangle, Softmax, segment_shape
from kernels.cuda import backend as cuda
from kernels.cuda import launch, staging
from kernels.cuda.staging import SIZES, Way
from tests.gpu.lent import lent
from tests.gpu.settings import (
    Part,
    Settings,
    kernels_of,
    lane_of,
    launching,
    start,
    wide_of,
)
from tests.gpu.timing import device_s, launch_s, replay_s, wall_s
from tests.gpu.trail import Figures
from tests.kernels.draw_scenes import logits_of, settings_of
from tests.kernels.instances import (
    SAMPLING_KERNELS,
    attention_kernels,
    kv_kernels,
    rowwise_kernels,
)
from tests.kernels.scenes import Scene, batch_of

Call = Callable[[], object]
BF16 = torch.bfloat16
GIB = 1 << 30
BLOCK_SIZE = 16
DRAWS: dict[str, dict[str, float]] = {
    "plain": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "both": {"top_k": 50, "top_p": 0.95},
}


def prompt_heads(settings: Settings) -> tuple[int, int, int]:
    """Return (query heads, KV heads, dimensions) of prompts."""
    return settings.size((32, 8, 128), (4, 2, 64))


def decode_heads(settings: Settings) -> tuple[int, int, int]:
    """Return those of generation: GQA 8."""
    return settings.size((32, 4, 128), (8, 1, 64))


def decode_lens(settings: Settings) -> dict[str, list[tuple[int, int]]]:
    """Return the sequences of generation, as (context, queries), by name."""
    long, short = [(8192, 1)] * 64, [(1024, 1)] * 16
    return {"long": settings.size(long, [(300, 1)]), "short": settings.size(short, [(40, 1)] * 2)}


def prompt_length(settings: Settings, kilo: int) -> int:
    """Return the length of a prompt of so many times 1024 tokens."""
    return settings.size(kilo << 10, 5 * kilo)


def limit_parts(settings: Settings) -> dict[str, Part]:
    """The device's copy and read rates, its matrix rate, and DMA to and from pinned memory."""
    parts = {"memory": _memory, "matmul": _matmul, "dma": _dma}
    return {name: partial(part, settings) for name, part in parts.items()}


def limit_rates(settings: Settings) -> dict[str, float]:
    """Return the read rate and the matrix rate, for a floor in another stage."""
    return {name: float(rate) for name, rate in (_memory(settings) | _matmul(settings)).items()}


def kernel_parts(settings: Settings) -> dict[str, Part]:
    """Each row of the table that one kernel makes."""
    parts: dict[str, Part] = {
        f"decode {name}": partial(_decode, settings, name) for name in decode_lens(settings)
    }
    parts |= {f"prefill {k}k": partial(_prefill, settings, k) for k in (8, 16)}
    parts["heads"] = partial(_heads, settings)
    parts |= {"pack and unpack": partial(_pack, settings), "draw": partial(_draw, settings)}
    return parts | {f"prefill wide {k}k": partial(_prefill_wide, settings, k) for k in (8, 16)}


def staging_parts(settings: Settings) -> dict[str, Part]:
    """KV between processes; to and from pinned memory by each way and size, a large one by DMA."""
    return {
        "lent": partial(lent, settings),
        "staged": partial(_staged, settings),
        "ways out": partial(_ways, settings, "out"),
        "ways back": partial(_ways, settings, "back"),
    }


def launch_parts(settings: Settings) -> dict[str, Part]:
    """The cost of a launch from Python, and inside a graph.

    Without a GPU nothing is started: the first figure is then what Python does on this CPU.
    """
    names = ("attend", "heads", "move", "rms_norm", "gate")
    return {name: partial(_launch, settings, name) for name in names}


def backend_of(settings: Settings, heads: tuple[int, int, int]) -> Backend:
    """Return the kernels that are measured."""
    needed = {"kv": kv_kernels(BF16, BF16), "rowwise": rowwise_kernels(BF16)}
    return kernels_of(settings, {"attention": attention_kernels(BF16, heads[2])} | needed)


def pages(
    settings: Settings,
    lens: list[tuple[int, int]],
    heads: tuple[int, int, int],
    num_layers: int = 1,
) -> Scene:
    """Make (context, queries) sequences in permuted blocks of a random bf16 pool."""
    num_heads, num_kv_heads, head_dim = heads
    counts = [-(-context // BLOCK_SIZE) for context, _ in lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    pool_shape = (sum(counts), num_layers, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    pool = torch.randn(pool_shape, dtype=BF16, device=settings.device)
    num_tokens = sum(queries for _, queries in lens)
    query = torch.randn(num_tokens, num_heads, head_dim, dtype=BF16, device=settings.device)
    return Scene(pool, batch_of(lens, tables, BLOCK_SIZE), query, [])


def table_of(it: Scene, sequence: int = 0) -> list[int]:
    """Return the blocks of one sequence."""
    count = -(-int(it.batch.context_lens[sequence]) // BLOCK_SIZE)
    return it.batch.block_tables[sequence, :count].tolist()


def flops(settings: Settings, length: int) -> float:
    """Return the operations of causal attention over one prompt with `prompt_heads`."""
    num_heads, _, head_dim = prompt_heads(settings)
    return 4 * num_heads * head_dim * length * length / 2


def _memory(settings: Settings) -> Figures:
    num_bytes = settings.size(4 * GIB, 1 << 20)
    if settings.backend == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=settings.device).random_()
    target = torch.empty_like(source)
    copy_s = device_s(lambda: target.copy_(source))
    read_s = device_s(lambda: source.view(torch.int64).sum())
    return {"copy_gbs": 2 * source.nbytes / copy_s / 1e9, "read_gbs": source.nbytes / read_s / 1e9}


def _matmul(settings: Settings) -> Figures:
    size = settings.size(8192, 64)
    # Zeros would draw less power.
    left = torch.randn(size, size, dtype=BF16, device=settings.device)
    right = torch.randn_like(left)
    return {"matmul_tflops": 2 * size**3 / device_s(lambda: left @ right) / 1e12}


def _dma(settings: Settings) -> Figures:
    num_bytes, has_device = settings.size(GIB, 1 << 20), settings.backend == "cuda"
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_device)
    device = torch.empty(num_bytes, dtype=torch.uint8, device=settings.device).random_()
    out_s = device_s(lambda: host.copy_(device, non_blocking=True))
    back_s = device_s(lambda: device.copy_(host, non_blocking=True))
    return {"d2h_gbs": num_bytes / out_s / 1e9, "h2d_gbs": num_bytes / back_s / 1e9}


def _decode(settings: Settings, name: str) -> Figures:
    heads = decode_heads(settings)
    it, kernels = pages(settings, decode_lens(settings)[name], heads), backend_of(settings, heads)
    seconds = device_s(lambda: _attend(kernels, it))
    return {
        f"decode_{name}_gbs": it.pool.nbytes / seconds / 1e9,
        f"decode_{name}_us": seconds * 1e6,
    }


def _prefill(settings: Settings, kilo: int) -> Figures:
    heads, length = prompt_heads(settings), prompt_length(settings, kilo)
    it, kernels = pages(settings, [(length, length)], heads), backend_of(settings, heads)
    seconds = device_s(lambda: _attend(kernels, it), repeats=7)
    return {f"prefill_{kilo}k_tflops": flops(settings, length) / seconds / 1e12}


def _prefill_wide(settings: Settings, kilo: int) -> Figures:
    heads, length = prompt_heads(settings), prompt_length(settings, kilo)
    it, attend = pages(settings, [(length, length)], heads), wide_of(settings, BF16, heads[2])
    scale = heads[2] ** -0.5
    seconds = device_s(lambda: attend(it.query, it.pool, 0, it.batch, Softmax(scale)), repeats=7)
    return {f"prefill_wide_{kilo}k_tflops": flops(settings, length) / seconds / 1e12}


def _heads(settings: Settings) -> Figures:
    """Read every head once and write it once, with the norm; angles and weights beside them."""
    heads, length = prompt_heads(settings), prompt_length(settings, 16)
    it, kernels = pages(settings, [(length, length)], heads), backend_of(settings, heads)
    moved = 2 * (it.query.nbytes + it.pool.nbytes)
    return {"heads_gbs": moved / device_s(_rotate_and_append(kernels, it)) / 1e9}


def _rotate_and_append(kernels: Backend, it: Scene) -> Call:
    """Return the step of those queries, with keys and values of ones."""
    (num_tokens, num_heads, head_dim), device = it.query.shape, it.pool.device
    num_kv_heads = it.pool.shape[3]
    key_value = it.query.new_ones(num_tokens, 2 * num_kv_heads, head_dim)
    heads = torch.cat((it.query, key_value), dim=1)
    rotation = torch.ones(num_tokens, 2, head_dim // 2, device=device)
    norm = torch.ones(num_heads + num_kv_heads, head_dim, device=device)
    arguments = heads, rotation, it.pool, 0, it.batch, norm, 1e-6
    return lambda: kernels.rotate_and_append(*arguments)


def _pack(settings: Settings) -> Figures:
    num_tokens, num_layers = settings.size(16_384, 64), settings.size(16, 2)
    it = pages(settings, [(num_tokens, 1)], prompt_heads(settings), num_layers)
    rectangle = Rectangle(range(num_layers), range(it.pool.shape[3]), range(num_tokens))
    out, back = _moves(settings, it, rectangle)
    moved = 2 * it.pool.nbytes / 1e9
    return {"pack_gbs": moved / device_s(out), "unpack_gbs": moved / device_s(back)}


def _draw(settings: Settings) -> Figures:
    """Tokens of 32 rows: greedy, and drawn with each filter."""
    num_rows, size = settings.size((32, 128 << 10), (2, 1000))
    kernels = kernels_of(settings, {"sampling": SAMPLING_KERNELS})
    logits = logits_of("peaked", num_rows, size, 1).to(settings.device)
    greedy = device_s(lambda: kernels.draw(logits))
    figures: Figures = {"draw_greedy_us": greedy * 1e6}
    for name, changes in DRAWS.items():
        rows = settings_of(num_rows, 1, **changes).to(settings.device)
        figures[f"draw_{name}_us"] = device_s(partial(kernels.draw, logits, rows)) * 1e6
    return figures


def _moves(settings: Settings, it: Scene, rectangle: Rectangle) -> tuple[Call, Call]:
    """Return the kernels out and back alone: their block table is uploaded before."""
    kernels = backend_of(settings, (0, 0, it.pool.shape[5]))
    shape = segment_shape(it.pool, rectangle)
    segment = torch.zeros(shape, dtype=BF16, device=settings.device)
    table = torch.tensor(table_of(it), dtype=torch.int32, device=settings.device)
    arguments = (it.pool, table, rectangle, segment)
    out, back = (launch.move(*arguments, into_pool=into_pool) for into_pool in (False, True))
    return partial(start, settings, kernels, out), partial(start, settings, kernels, back)


def _staged(settings: Settings) -> Figures:
    num_tokens, num_layers = settings.size(4096, 64), settings.size(16, 2)
    it = pages(settings, [(num_tokens, 1)], prompt_heads(settings), num_layers)
    lane = lane_of(settings, BF16)
    rectangle = Rectangle(range(num_layers), range(it.pool.shape[3]), range(num_tokens))
    pack = partial(staging.pack, Way.STAGED, lane, it.pool, table_of(it), rectangle)
    lane.mark()
    num_bytes = pack().nbytes
    return {"pack_pinned_gbs": num_bytes / wall_s(pack) / 1e9, "pack_pinned_bytes": num_bytes}


def _ways(settings: Settings, direction: str) -> Figures:
    num_tokens, num_layers = settings.size(4096, 64), settings.size(16, 2)
    it = pages(settings, [(num_tokens, 1)], prompt_heads(settings), num_layers)
    lane = lane_of(settings, BF16)
    figures: Figures = {}
    lane.mark()
    for size in settings.size(SIZES, SIZES[:1]):
        rectangle = staging.rectangle_of(size, it.pool)
        segment = torch.zeros(segment_shape(it.pool, rectangle), dtype=BF16)
        for way in Way:
            if direction == "out":
                copy = partial(staging.pack, way, lane, it.pool, table_of(it), rectangle)
                seconds = wall_s(copy)
            else:
                back = partial(staging.unpack, way, lane, it.pool, table_of(it), rectangle)
                seconds = wall_s(partial(back, segment))
            figures[f"{direction}_{size >> 10}k_{way.value}_gbs"] = segment.nbytes / seconds / 1e9
    return figures


def _launch(settings: Settings, name: str) -> Figures:
    heads, device = decode_heads(settings), settings.device
    it = pages(settings, [(64, 1)] * 4, heads)
    rows, weight = torch.zeros(4, 4096, dtype=BF16, device=device), torch.ones(4096, device=device)
    segment = torch.zeros(1, 2, heads[1], 64, heads[2], dtype=BF16, device=device)
    table = torch.tensor(table_of(it), dtype=torch.int32, device=device)
    moved = table, Rectangle(range(1), range(heads[1]), range(64)), segment
    calls: dict[str, Call] = {
        "attend": lambda: _attend(cuda, it),
        "heads": _rotate_and_append(cuda, it),
        "move": lambda: cuda.start(device, launch.move(it.pool, *moved, into_pool=False)),
        "rms_norm": lambda: cuda.add_rms_norm(rows, rows, weight, 1e-5),
        "gate": lambda: cuda.gate(rows, SILU),
    }
    with launching(settings):
        launch_us, graph_us = launch_s(calls[name]) * 1e6, replay_s(calls[name]) * 1e6
    return {f"launch_{name}_us": launch_us, f"graph_{name}_us": graph_us}


def _attend(kernels: Backend, it: Scene) -> torch.Tensor:
    scale = it.query.shape[2] ** -0.5
    return kernels.paged_attention(it.query, it.pool, 0, it.batch, Softmax(scale))
