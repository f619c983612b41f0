"""The CUDA kernels through the shim, on adversarial scenes, against the formula in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kernels.contract import Backend
from kernels.cuda import launch
from kernels.cuda.tiling import Gpu
from tests.kernels.instances import all_moves, attention_kernels, kv_kernels, wide_kernels
from tests.kernels.scenes import (
    check,
    check_conversions,
    check_moves,
    heads_error,
    scene,
    sinks_of,
)
from tests.kernels.shim.backend import GPU, HOPPER, LARGE_GPU, Shim, why_not

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# (head_dim, dtype): one of each kind, the others with --full.
SHAPES = [(64, BF16), (80, FP16)]
MORE_SHAPES = [(d, t) for d in launch.TILED_HEAD_DIMS for t in (BF16, FP16)] + [(128, FP32)]
WIDE, MORE_WIDE = [(64, BF16), (128, FP16)], [(64, FP16), (128, BF16)]
# (context, queries) of each sequence: one token, borders of blocks and of tiles, ragged tails,
# chunks of prompts, generation beside prompts, keys enough to be split.
BATCHES = {
    "borders": [(1, 1), (15, 1), (16, 1), (17, 1), (64, 1), (65, 1)],
    "chunks": [(70, 33), (129, 64), (33, 1), (37, 37)],
    "mixed": [(5, 5), (300, 1), (66, 3), (128, 1)],
    "split": [(700, 1), (513, 2)],
    "split prompts": [(700, 40)],
}


@pytest.fixture(autouse=True)
def _needs_compiler() -> None:
    if reason := why_not():
        pytest.skip(reason)


@cache
def shim(
    head_dim: int, dtype: torch.dtype, order: int = 2, late: bool = True, gpu: Gpu = GPU
) -> Backend:
    names = {
        "attention": attention_kernels(dtype, head_dim, gpu),
        "attention_hopper": wide_kernels(dtype, head_dim) if gpu.is_wide else [],
        "kv": kv_kernels(dtype, dtype),
    }
    return Shim(names, order=order, late=late, gpu=gpu)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, few, more in (("shape", SHAPES, MORE_SHAPES), ("wide_shape", WIDE, MORE_WIDE)):
        if name in metafunc.fixturenames:
            shapes = few + (more if metafunc.config.getoption("--full") else [])
            found = list(dict.fromkeys(shapes))
            metafunc.parametrize(name, found, ids=[f"{d}-{str(t)[6:]}" for d, t in found])


@pytest.mark.parametrize("window", [None, 24], ids=["all", "window"])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention(shape: tuple[int, torch.dtype], batch: str, window: int | None) -> None:
    head_dim, dtype = shape
    serving = shim(head_dim, dtype)
    check(scene(BATCHES[batch], head_dim=head_dim, dtype=dtype), window, serving)
    it = scene(BATCHES[batch], head_dim=head_dim, dtype=dtype, num_heads=6)
    for cap, sinks in ((None, sinks_of(it)), (3.0, sinks_of(it, 1))):
        check(it, window, serving, cap=cap, sinks=sinks)


def test_heads_for_which_there_are_no_tiles() -> None:
    it = scene([(40, 13), (17, 1)], num_heads=6, head_dim=24, dtype=BF16)
    for window, cap, sinks in ((24, None, sinks_of(it)), (None, 3.0, sinks_of(it, 1))):
        check(it, window, shim(24, BF16), cap=cap, sinks=sinks)


def test_the_first_part_of_the_keys_may_outweigh_the_others() -> None:
    it = scene([(700, 1), (700, 40)], head_dim=64, dtype=BF16, first_key=8.0)
    check(it, None, shim(64, BF16))


@pytest.mark.parametrize("gpu", [GPU, HOPPER], ids=["usual", "hopper"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size"), [(4, 4, 8), (8, 1, 32), (6, 2, 64), (20, 1, 16)]
)
def test_shared_heads_and_blocks(heads: int, kv_heads: int, block_size: int, gpu: Gpu) -> None:
    it = scene(
        [(150, 80), (90, 1), (3, 3)],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        dtype=BF16,
        block_size=block_size,
    )
    check(it, None, shim(64, BF16, gpu=gpu))


@pytest.mark.parametrize("window", [None, 24], ids=["all", "window"])
@pytest.mark.parametrize("batch", ["chunks", "split prompts"])
def test_tiles_of_a_card_with_more_shared_memory(
    shape: tuple[int, torch.dtype], batch: str, window: int | None
) -> None:
    it = scene(BATCHES[batch], head_dim=shape[0], dtype=shape[1])
    check(it, window, shim(*shape, gpu=LARGE_GPU))


@pytest.mark.parametrize(
    "window", [None, pytest.param(24, marks=pytest.mark.full("130 cuts more tiles")), 130]
)
@pytest.mark.parametrize("batch", ["chunks", "split prompts", "wide"])
def test_many_rows_on_hopper(
    wide_shape: tuple[int, torch.dtype], batch: str, window: int | None
) -> None:
    lens = BATCHES.get(batch, [(300, 300), (64, 64), (129, 128), (513, 33)])
    it = scene(lens, head_dim=wide_shape[0], dtype=wide_shape[1], num_heads=6, block_size=64)
    for cap, sinks in ((None, None), (3.0, sinks_of(it))):
        check(it, window, shim(*wide_shape, gpu=HOPPER), cap=cap, sinks=sinks)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_any_order_of_threads_and_copies_gives_the_same(order: int, late: bool) -> None:
    it = scene([(70, 33), (300, 1)], head_dim=64, dtype=BF16)
    check(it, 24, shim(64, BF16, order, late))


@pytest.mark.parametrize("is_far", [False, True], ids=["near", "beyond 32 bits"])
def test_append_and_move_are_bit_for_bit(is_far: bool) -> None:
    check_moves(shim(64, BF16), BF16, is_far=is_far)
    check(scene([(40, 20), (70, 1)], head_dim=64, dtype=BF16, is_far=is_far), None, shim(64, BF16))


@cache
def every_move() -> Backend:
    return Shim(all_moves())


@pytest.mark.parametrize("held", launch.POOL_DTYPES, ids=str)
@pytest.mark.parametrize("sent", launch.DTYPE_NAMES, ids=str)
def test_conversions_are_those_of_torch(held: torch.dtype, sent: torch.dtype) -> None:
    check_conversions(every_move(), held, sent)


@pytest.mark.parametrize("dtype", launch.POOL_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
def test_heads_are_normed_rotated_and_appended(
    dtype: torch.dtype, head_dim: int, is_normed: bool
) -> None:
    for num_tokens, heads in ((0, (4, 2)), (1, (7, 1)), (3, (9, 3)), (21, (4, 4)), (70, (6, 2))):
        sizes = dtype, head_dim, num_tokens, heads
        assert heads_error(every_move(), *sizes, is_normed=is_normed) <= 1, sizes
