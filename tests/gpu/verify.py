"""Every kernel on fresh random inputs: the scenes of `tests/kernels`, on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kernels import Rectangle, reference
from kernels.cuda import launch, staging
from kernels.cuda import prompt_attention as prompts
from kernels.cuda.staging import Way
from kernels.cuda.tiling import WIDE_HEAD_DIMS
from tests.gpu.settings import (
    Part,
    Settings,
    compute,
    finish,
    is_computing,
    kernels_of,
    lane_of,
    wide_of,
)
from tests.gpu.timing import spend
from tests.gpu.trail import Figures
from tests.kernels import draw_scenes, rowwise_scenes
from tests.kernels.instances import (
    SAMPLING_KERNELS,
    all_moves,
    attention_kernels,
    rowwise_kernels,
)
from tests.kernels.scenes import check, check_conversions, heads_error, scene, sinks_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TILED = [(head_dim, dtype) for head_dim in launch.TILED_HEAD_DIMS for dtype in (BF16, FP16)]
PLAIN = [(24, BF16), (40, FP16), (64, FP32), (128, FP32)]
# (query heads, KV heads)
HEADS = ((8, 2), (4, 4), (8, 1), (6, 2), (20, 1))


class Wrong(Exception):
    """A kernel gave something else than it should have."""


@contextmanager
def inputs(**values: object) -> Iterator[None]:
    """Name the inputs in the error of a check that fails on them."""
    try:
        yield
    except AssertionError as error:
        raise Wrong(f"{error}; inputs: {values}") from None


def kv_parts(settings: Settings) -> dict[str, Part]:
    """`rotate_and_append` and `move`: every pool dtype; see `_heads` and `_move`."""
    parts: dict[str, Part] = {}
    for dtype in launch.POOL_DTYPES:
        parts[f"heads {_name(dtype)}"] = partial(_heads, settings, dtype)
        parts[f"move {_name(dtype)}"] = partial(_move, settings, dtype)
    return parts


def row_parts(settings: Settings) -> dict[str, Part]:
    """`rms_norm` and `gate`: every dtype; see `_rows`."""
    return {f"rows {_name(dtype)}": partial(_rows, settings, dtype) for dtype in launch.POOL_DTYPES}


def draw_parts(settings: Settings) -> dict[str, Part]:
    """`draw`: the tokens that the CPU draws, of every kind of row with every filter."""
    return {"draw": partial(_draw, settings)}


def attention_parts(settings: Settings) -> dict[str, Part]:
    """Attention with tiles (`attend`, `attend_wide`) and without, on random batches."""
    # The longest is split.  The plain kernel goes key by key, and the shim
    # would take a minute for long ones, and the formula on a CPU several for all of 3000 tokens.
    full = 3000 if settings.backend == "cuda" else 800
    tiled, longest = ([(64, BF16)], 560) if settings.is_small else (TILED, full)
    plain, plain_longest = (PLAIN[:1], 90) if settings.is_small else (PLAIN, full)
    parts: dict[str, Part] = {
        f"tiled {d} {_name(t)}": partial(_attention, settings, d, t, longest) for d, t in tiled
    }
    parts["prompts"] = partial(_prompts, settings)
    parts |= {
        f"plain {d} {_name(t)}": partial(_attention, settings, d, t, plain_longest)
        for d, t in plain
    }
    # Last, for a fault ends the process.
    return parts | {
        f"wide {d} {_name(t)}": partial(_attention, settings, d, t, longest, is_wide=True)
        for d, t in tiled
        if d in WIDE_HEAD_DIMS
    }


def staging_parts(settings: Settings) -> dict[str, Part]:
    """Every way between pool and host; and that copies wait for what computes."""
    return {"ways": partial(_ways, settings), "order": partial(_order, settings)}


def _prompts(settings: Settings) -> Figures:
    """Whole prompts by torch, as `kernels.cuda.prompt_attention` gathers them."""
    draw = settings.random("prompts")
    flash = SimpleNamespace(
        paged_attention=lambda query, pool, layer, batch, softmax: prompts.flash(
            query, pool[:, layer], batch, softmax.scale
        )
    )
    for heads in HEADS:
        lens = [(length, length) for length in draw.sample(range(1, 300), 3)]
        with inputs(heads=heads, lens=lens):
            case = scene(
                lens,
                num_heads=heads[0],
                num_kv_heads=heads[1],
                head_dim=64,
                dtype=BF16,
                device=settings.device,
            )
            check(case, None, flash)
    return {"cases": len(HEADS)}


def _attention(
    settings: Settings, head_dim: int, dtype: torch.dtype, longest: int, *, is_wide: bool = False
) -> Figures:
    draw = settings.random(f"attention {head_dim} {dtype}")
    it: Any
    if is_wide:
        it = SimpleNamespace(paged_attention=wide_of(settings, dtype, head_dim))
    else:
        it = kernels_of(settings, {"attention": attention_kernels(dtype, head_dim)})
    num_cases = settings.size(10, 2)
    for number in range(num_cases):
        num_heads, num_kv_heads = HEADS[number % len(HEADS)]
        lens, seed = lengths(draw, longest), draw.getrandbits(60)
        window = None if number % 2 == 0 else draw.choice([1, 24, 100, 5000])
        cap = draw.choice([2.0, 30.0]) if number % 3 == 1 else None
        case = scene(
            lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=draw.choice([8, 16, 32, 64]),
            dtype=dtype,
            seed=seed,
            device=settings.device,
        )
        sinks = sinks_of(case, seed).to(settings.device) if number % 4 in (1, 2) else None
        with inputs(heads=num_heads, lens=lens, seed=seed, window=window, cap=cap, sinks=sinks):
            check(case, window, it, cap=cap, sinks=sinks)
    return {"cases": num_cases}


def lengths(draw: random.Random, longest: int) -> list[tuple[int, int]]:
    """Draw (context, queries): borders of blocks and tiles, prompts, chunks, one to be split."""
    chunk = draw.randint(2, longest // 4)
    few = [(context, 1) for context in draw.sample([1, 15, 16, 17, 63, 64, 65, 127, 128, 129], 4)]
    some = [
        (longest - draw.randint(0, 40), draw.randint(1, 3)),
        (chunk + draw.randint(1, longest // 4), chunk),
        (prompt := draw.randint(2, longest // 3), prompt),
    ]
    found = few + some
    draw.shuffle(found)
    return found


def _heads(settings: Settings, dtype: torch.dtype) -> Figures:
    """Queries and keys, with and without a norm; values bit for bit."""
    draw = settings.random(f"heads {dtype}")
    it = kernels_of(settings, all_moves())
    cases = [(d, is_normed) for d in (64, 80, 128, 256, 24, 8) for is_normed in (False, True)]
    worst, longest = 0.0, settings.size(900, 40)
    for head_dim, is_normed in cases:
        sizes = dtype, head_dim, draw.randint(1, longest), draw.choice(HEADS)
        seed, device = draw.getrandbits(60), settings.device
        share = heads_error(it, *sizes, is_normed=is_normed, device=device, seed=seed)
        if not share <= 1:
            raise Wrong(f"{share:.3g} of what is tolerated: {sizes=}, {is_normed=}, {seed=}")
        worst = max(worst, share)
    return {"cases": len(cases), "worst share of the tolerance": round(worst, 3)}


def _rows(settings: Settings, dtype: torch.dtype) -> Figures:
    """Norms, with and without something to add, and gates, of any width."""
    draw = settings.random(f"rows {dtype}")
    it = kernels_of(settings, {"rowwise": rowwise_kernels(dtype)})
    sizes = [1, 7, 576, 4096, draw.randint(1, 9000)]
    for size in sizes:
        with inputs(size=size):
            rowwise_scenes.check_all(it, dtype, size, settings.device.type)
    return {"cases": len(sizes)}


def _draw(settings: Settings) -> Figures:
    it, seed = kernels_of(settings, {"sampling": SAMPLING_KERNELS}), settings.seed % 10_000
    with inputs(first_seed=seed):
        num_rows = settings.size(40, 3)
        draw_scenes.check_all(it, settings.device.type, num_rows=num_rows, first_seed=seed)
    return {"cases": len(draw_scenes.KINDS) * len(draw_scenes.FILTERS)}


def _move(settings: Settings, held: torch.dtype) -> Figures:
    """Out and in, for every dtype of the wire, with torch's own conversions."""
    it = kernels_of(settings, all_moves())
    for sent in launch.DTYPE_NAMES:
        with inputs(sent=sent):
            check_conversions(it, held, sent, settings.device)
    return {"cases": len(launch.DTYPE_NAMES)}


def _ways(settings: Settings) -> Figures:
    draw = settings.random("ways")
    lane, num_cases = lane_of(settings, BF16), 0
    pool = torch.randn(9, 3, 2, 2, 16, 64, device=settings.device).to(BF16)
    for way in Way:
        for _ in range(4):
            table = draw.sample(range(9), 6)
            layers, tokens = range(draw.randint(0, 2), 3), range(draw.randint(0, 90), 96)
            heads = draw.choice([range(2), range(1), range(1, 2)])
            want = reference.pack_kv(pool.cpu(), table, Rectangle(layers, heads, tokens), BF16)
            lane.mark()
            _same(
                staging.pack(way, lane, pool, table, Rectangle(layers, heads, tokens)),
                want,
                f"pack {way}",
            )
            wanted, filled = torch.zeros_like(pool, device="cpu"), torch.zeros_like(pool)
            lane.mark()
            reference.unpack_kv(wanted, table, Rectangle(layers, heads, tokens), want)
            staging.unpack(way, lane, filled, table, Rectangle(layers, heads, tokens), want)
            _same(filled.cpu(), wanted, f"unpack {way}")
            num_cases += 2
    return {"cases": num_cases}


def _order(settings: Settings) -> Figures:
    """Copies must see what was asked for before the mark, however late it runs; and only that."""
    lane = lane_of(settings, BF16)
    for way in Way:
        pool = torch.zeros(4, 2, 2, 2, 16, 64, dtype=BF16, device=settings.device)
        lane.mark()
        # The first time compiles and allocates, for which the driver may wait for all streams.
        staging.pack(way, lane, pool, [1, 2], Rectangle(range(2), range(2), range(32)))
        compute(lane, partial(spend, 200_000_000))
        compute(lane, partial(pool.fill_, 3))
        lane.mark()
        compute(lane, partial(spend, 2_000_000_000))  # the next step
        sent = staging.pack(way, lane, pool, [1, 2], Rectangle(range(2), range(2), range(32)))
        if not bool((sent == 3).all()):
            raise Wrong(f"{way} packed before the step that was asked for earlier had run")
        if not is_computing(lane):
            raise Wrong(f"{way} waited for a step that was asked for later")
        finish(lane)
    return {"cases": len(Way)}


def _same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if not torch.equal(got, want):
        raise Wrong(f"{what}: {int((got != want).sum())} of {got.numel()} values differ")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
