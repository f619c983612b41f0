"""Every kernel on fresh random inputs, against the formula or, where bits must agree, torch."""

from __future__ import annotations

import math
import random
from functools import partial

import torch

from kernels import GELU_TANH, SILU, Activation, reference
from kernels.cpu import backend as cpu
from kernels.cuda import launch, staging
from kernels.cuda import prompt_attention as prompts
from kernels.cuda.staging import Way
from kernels.cuda.tiling import WIDE_HEAD_DIMS
from tests.gpu.inputs import FLOOR, TOLERANCE, Shape, error, formula, lengths, paged
from tests.gpu.settings import (
    Part,
    Settings,
    all_moves,
    compute,
    finish,
    is_computing,
    kernels_of,
    lane_of,
    wide_of,
)
from tests.gpu.timing import spend
from tests.gpu.trail import Figures
from tests.kernels.draw_scenes import (
    FILTERS,
    KINDS,
    SIZES,
    TEMPERATURES,
    allowed_of,
    logits_of,
    settings_of,
)
from tests.kernels.instances import SAMPLING_KERNELS, attention_kernels, rowwise_kernels
from tests.kernels.scenes import heads_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TILED = [(head_dim, dtype) for head_dim in launch.TILED_HEAD_DIMS for dtype in (BF16, FP16)]
PLAIN = [(24, BF16), (40, FP16), (64, FP32), (128, FP32)]
# (query heads, KV heads)
HEADS = ((4, 4), (8, 2), (8, 1), (6, 2), (20, 1))


class Wrong(Exception):
    """A kernel gave something else than it should have."""


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
    draw, worst = settings.random("prompts"), 0.0
    for heads, kv_heads in HEADS:
        lens = [(length, length) for length in draw.sample(range(1, 300), 3)]
        case = paged(lens, Shape(heads, kv_heads, 64, 16, BF16), settings.device, draw)
        got = prompts.flash(case.query, case.pool[:, 1], case.batch, 0.125)
        share = error(got, formula(case, 1, 0.125, None), TOLERANCE[BF16], FLOOR[BF16])
        if not share <= 1:
            raise Wrong(f"{share:.3g} of what is tolerated: {heads=}, {kv_heads=}, {lens=}")
        worst = max(worst, share)
    return {"cases": 3 * len(HEADS), "worst share of the tolerance": round(worst, 3)}


def _attention(
    settings: Settings, head_dim: int, dtype: torch.dtype, longest: int, *, is_wide: bool = False
) -> Figures:
    draw = settings.random(f"attention {head_dim} {dtype}")
    if is_wide:
        attend = wide_of(settings, dtype, head_dim)
    else:
        needed = {"attention": attention_kernels(dtype, head_dim)}
        attend = kernels_of(settings, needed).paged_attention
    worst, num_cases = 0.0, 2 if settings.is_small else 10
    tolerance = TOLERANCE[dtype] * max(1.0, head_dim / 64)
    for number in range(num_cases):
        heads, kv_heads = HEADS[number % len(HEADS)] if number else (8, 2)
        shape = Shape(heads, kv_heads, head_dim, draw.choice([8, 16, 32, 64]), dtype)
        lens = lengths(draw, longest)
        case = paged(lens, shape, settings.device, draw)
        window = None if number % 2 == 0 else draw.choice([1, 24, 100, 5000])
        scale, layer = head_dim**-0.5, number % 2
        cap = draw.choice([2.0, 30.0]) if number % 3 == 1 else None
        sinks = _random((heads,), settings, draw) * 4 if number % 4 in (1, 2) else None
        softmax = (scale, window, cap, sinks)
        got = attend(case.query, case.pool, layer, case.batch, *softmax)
        share = error(got, formula(case, layer, *softmax), tolerance, FLOOR[dtype])
        if not share <= 1:
            given = f"{shape}, {window=}, {cap=}, {sinks=}, {layer=}, {lens=}"
            raise Wrong(f"{share:.3g} of what is tolerated: {given}")
        worst = max(worst, share)
    return {"cases": num_cases, "worst share of the tolerance": round(worst, 3)}


def _heads(settings: Settings, dtype: torch.dtype) -> Figures:
    """Queries and keys, with and without a norm; values bit for bit."""
    draw = settings.random(f"heads {dtype}")
    it = kernels_of(settings, all_moves())
    cases = [(d, is_normed) for d in (64, 80, 128, 256, 24, 8) for is_normed in (False, True)]
    worst, longest = 0.0, 40 if settings.is_small else 900
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
        num_rows = draw.randint(1 if size >= 7 else 12, 40)
        x, added = (_random((num_rows, size), settings, draw).mul_(3).to(dtype) for _ in range(2))
        weight = _random((size,), settings, draw)
        total = x.clone()
        for what, got, rows in (
            ("norm", it.rms_norm(x, weight, 1e-5), x),
            ("norm of a sum", it.add_rms_norm(total, added, weight, 1e-5), x + added),
        ):
            wide = rows.double()
            want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            _near(got, want, dtype, f"{what} of {num_rows} rows of {size}")
        _same(total, x + added, f"the sum of {num_rows} rows of {size}")
        both, wide, up = torch.cat((x, added), 1), x.double(), added.double()
        tanh = torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
        low = wide.clamp(max=0.5)
        for activation, want in (
            (SILU, wide * wide.sigmoid() * up),
            (GELU_TANH, wide * (1 + tanh) / 2 * up),
            (
                Activation(1.7, 0.0, 0.5, 1.0),
                low * (1.7 * low).sigmoid() * (up.clamp(-0.5, 0.5) + 1),
            ),
        ):
            # As one row: what a gate all but closes may be rounded to 0, and a row of such alone
            # would have no size to measure that by.
            got = it.gate(both, activation).flatten()
            _near(got, want.flatten(), dtype, f"gate of {num_rows} x {size}")
    return {"cases": 4 * len(sizes)}


def _draw(settings: Settings) -> Figures:
    draw = settings.random("draw")
    it = kernels_of(settings, {"sampling": SAMPLING_KERNELS})
    num_cases = settings.size(300, 12)
    for _ in range(num_cases):
        kind, changes = draw.choice(list(KINDS)), draw.choice(FILTERS)
        num_rows, size = draw.randint(1, 40), draw.choice([*SIZES, settings.size(151_937, 5000)])
        temperature, seed = draw.choice([*TEMPERATURES, draw.uniform(0.3, 2)]), draw.getrandbits(30)
        logits = logits_of(kind, num_rows, size, seed)
        rows = settings_of(num_rows, seed, **{"temperature": temperature, **changes})
        allowed = allowed_of(num_rows, size, seed, draw.random()) if draw.random() < 0.3 else None
        bits = None if allowed is None else allowed.to(settings.device)
        got = it.draw(logits.to(settings.device), rows.to(settings.device), bits).tolist()
        want = cpu.draw(logits, rows, allowed).tolist()
        if got != want:
            given = f"{kind=}, {changes}, {temperature=}, {size=}, {seed=}"
            raise Wrong(f"drew {got}, not {want}: {given}")
    return {"cases": num_cases}


def _near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    share = error(got, want, TOLERANCE[dtype], FLOOR[dtype])
    if not share <= 1:
        raise Wrong(f"{what}: {share:.3g} of what is tolerated")


def _move(settings: Settings, held: torch.dtype) -> Figures:
    """Out and in, for every dtype of the wire, with torch's own conversions."""
    draw = settings.random(f"move {held}")
    it = kernels_of(settings, all_moves())
    num_cases = 0
    for sent in launch.DTYPE_NAMES:
        for head_dim, block_size in ((64, 16), (80, 32), (8, 8)):
            pool = _random((7, 3, 2, 2, block_size, head_dim), settings, draw).mul_(30).to(held)
            # Ties, too small, too large, infinite: each in its place.
            odd = [1.0625, 1.1875, 2.0**-10, 449.0, 465.0, 1e5, -1e5, math.inf, -0.0]
            pool.view(-1)[: len(odd)] = torch.tensor(odd, device=pool.device).to(held)
            table = draw.sample(range(7), 5)
            layers = range(draw.randint(0, 1), draw.randint(2, 3))
            tokens = range(draw.randint(0, 9), draw.randint(10, 5 * block_size))
            heads = draw.choice([range(2), range(1), range(1, 2)])
            want = reference.pack_kv(pool.cpu(), table, layers, tokens, sent, heads)
            got = it.pack_kv(pool, table, layers, tokens, sent, heads)
            _same(got.cpu(), want, f"pack {held} to {sent}, {tokens}, {head_dim=}")
            wanted, filled = torch.zeros_like(pool, device="cpu"), torch.zeros_like(pool)
            reference.unpack_kv(wanted, table, layers, tokens, want, heads)
            it.unpack_kv(filled, table, layers, tokens, want.to(pool.device), heads)
            _same(filled.cpu(), wanted, f"unpack {sent} to {held}, {tokens}, {head_dim=}")
            num_cases += 2
    return {"cases": num_cases}


def _ways(settings: Settings) -> Figures:
    draw = settings.random("ways")
    lane, num_cases = lane_of(settings, BF16), 0
    pool = _random((9, 3, 2, 2, 16, 64), settings, draw).to(BF16)
    for way in Way:
        for _ in range(4):
            table = draw.sample(range(9), 6)
            layers, tokens = range(draw.randint(0, 2), 3), range(draw.randint(0, 90), 96)
            heads = draw.choice([range(2), range(1), range(1, 2)])
            want = reference.pack_kv(pool.cpu(), table, layers, tokens, BF16, heads)
            lane.mark()
            _same(staging.pack(way, lane, pool, table, layers, heads, tokens), want, f"pack {way}")
            wanted, filled = torch.zeros_like(pool, device="cpu"), torch.zeros_like(pool)
            lane.mark()
            reference.unpack_kv(wanted, table, layers, tokens, want, heads)
            staging.unpack(way, lane, filled, table, layers, heads, tokens, want)
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
        staging.pack(way, lane, pool, [1, 2], range(2), range(2), range(32))
        compute(lane, partial(spend, 200_000_000))
        compute(lane, partial(pool.fill_, 3))
        lane.mark()
        compute(lane, partial(spend, 2_000_000_000))  # the next step
        sent = staging.pack(way, lane, pool, [1, 2], range(2), range(2), range(32))
        if not bool((sent == 3).all()):
            raise Wrong(f"{way} packed before the step that was asked for earlier had run")
        if not is_computing(lane):
            raise Wrong(f"{way} waited for a step that was asked for later")
        finish(lane)
    return {"cases": len(Way)}


def _random(shape: tuple[int, ...], settings: Settings, draw: random.Random) -> torch.Tensor:
    generator = torch.Generator(settings.device).manual_seed(draw.getrandbits(60))
    return torch.randn(shape, device=settings.device, generator=generator)


def _same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    left, right = got.float(), want.float()
    differs = (left != right) & ~(left.isnan() & right.isnan())
    if bool(differs.any()):
        raise Wrong(f"{what}: {int(differs.sum())} of {differs.numel()} values differ")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
