"""One suite for every backend: the same adversarial scenes, against the formula in float64."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch.nn.functional import gelu

import kernels
from kernels import GELU_TANH, SILU, reference
from kernels.contract import Backend
from kernels.cuda import launch
from kernels.cuda.tiling import Gpu
from tests.kernels.backends import BACKENDS as CUDA_BACKENDS
from tests.kernels.backends import backend_named
from tests.kernels.instances import (
    attention_kernels,
    kv_kernels,
    rowwise_kernels,
    wide_kernels,
)
from tests.kernels.rowwise_scenes import CLAMPED, clamped
from tests.kernels.scenes import Scene, check, check_moves, fresh, heads_error, scene, sinks_of
from tests.kernels.shim.backend import GPU, HOPPER, LARGE_GPU, Shim, why_not

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn

# (head_dim, dtype): one of each kind, the others with --full.
SHAPES = [(64, BF16), (80, FP16)]
MORE_SHAPES = [(d, t) for d in launch.TILED_HEAD_DIMS for t in (BF16, FP16)]
MORE_SHAPES += [(128, FP32), (24, BF16)]  # the plain kernel
# (context, queries) of each sequence: one token, borders of blocks and of tiles, ragged tails,
# chunks of prompts, generation beside prompts, keys enough to be split.
BATCHES = {
    "one token": [(1, 1)],
    "borders": [(15, 1), (16, 1), (17, 1), (64, 1), (65, 1)],
    "a prompt": [(37, 37)],
    "chunks": [(70, 33), (129, 64), (33, 1)],
    "mixed": [(5, 5), (300, 1), (66, 3), (128, 1)],
    "split": [(700, 1), (513, 2)],
    "split prompts": [(700, 40)],
}


@cache
def shim(
    head_dim: int, dtype: torch.dtype, order: int = 2, late: bool = True, gpu: Gpu = GPU
) -> Shim:
    names = {
        "attention": attention_kernels(dtype, head_dim, gpu),
        "attention_hopper": wide_kernels(dtype, head_dim) if gpu.is_wide else [],
        "kv": kv_kernels(dtype, dtype),
        "rowwise": rowwise_kernels(dtype),
    }
    return Shim(names, order=order, late=late, gpu=gpu)


def backend(name: str, head_dim: int, dtype: torch.dtype) -> Backend:
    if name == "reference":
        return reference
    if name == "cpu":
        return kernels.backend_of("cpu")
    return backend_named(name, partial(shim, head_dim, dtype))


def shapes(config: pytest.Config) -> list[tuple[int, torch.dtype]]:
    return list(dict.fromkeys(SHAPES + (MORE_SHAPES if config.getoption("--full") else [])))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shape" in metafunc.fixturenames:
        found = shapes(metafunc.config)
        metafunc.parametrize("shape", found, ids=[f"{d}-{str(t)[6:]}" for d, t in found])


BACKENDS = ["reference", "cpu", *CUDA_BACKENDS]


def to_device(it: Scene, name: str) -> Scene:
    if name != "cuda":
        return it
    return it._replace(
        pool=it.pool.cuda(), query=it.query.cuda(), batch=fresh(it.batch), dense=it.dense
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [None, 24], ids=["all", "window"])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention(
    name: str, shape: tuple[int, torch.dtype], batch: str, window: int | None
) -> None:
    head_dim, dtype = shape
    serving = backend(name, head_dim, dtype)
    it = scene(BATCHES[batch], head_dim=head_dim, dtype=dtype, block_size=16)
    check(to_device(it, name), window, serving)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_first_part_of_the_keys_may_outweigh_the_others(name: str) -> None:
    serving = backend(name, 64, BF16)
    it = scene([(700, 1), (700, 40)], head_dim=64, dtype=BF16, first_key=8.0)
    check(to_device(it, name), None, serving)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size"), [(4, 4, 8), (8, 1, 32), (6, 2, 64), (20, 1, 16)]
)
def test_shared_heads_and_blocks(name: str, heads: int, kv_heads: int, block_size: int) -> None:
    serving = backend(name, 64, BF16)
    it = scene(
        [(50, 20), (90, 1), (3, 3)],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        dtype=BF16,
        block_size=block_size,
    )
    check(to_device(it, name), None, serving)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [None, 24], ids=["all", "window"])
@pytest.mark.parametrize("batch", ["chunks", "mixed", "split", "split prompts"])
def test_sinks_and_caps(
    name: str, shape: tuple[int, torch.dtype], batch: str, window: int | None
) -> None:
    head_dim, dtype = shape
    serving = backend(name, head_dim, dtype)
    it = scene(BATCHES[batch], head_dim=head_dim, dtype=dtype, num_heads=6)
    for cap, sinks in ((None, sinks_of(it)), (3.0, sinks_of(it, 1))):
        check(to_device(it, name), window, serving, cap=cap, sinks=sinks)


@pytest.mark.parametrize("name", BACKENDS)
def test_heads_for_which_there_are_no_tiles(name: str) -> None:
    serving = backend(name, 24, BF16)
    it = scene([(70, 33), (129, 1), (5, 5)], num_heads=6, head_dim=24, dtype=BF16)
    for window, cap, sinks in ((24, None, sinks_of(it)), (None, 3.0, sinks_of(it, 1))):
        check(to_device(it, name), window, serving, cap=cap, sinks=sinks)


@pytest.mark.parametrize("window", [None, 24], ids=["all", "window"])
@pytest.mark.parametrize("batch", ["a prompt", "chunks", "split prompts"])
def test_tiles_of_a_card_with_more_shared_memory(
    shape: tuple[int, torch.dtype], batch: str, window: int | None
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    head_dim, dtype = shape
    it = scene(BATCHES[batch], head_dim=head_dim, dtype=dtype)
    check(it, window, shim(head_dim, dtype, gpu=LARGE_GPU))


WIDE = [(64, BF16), (128, FP16)]
MORE_WIDE = [(64, FP16), (128, BF16)]


def wide(shape: tuple[int, torch.dtype], config: pytest.Config) -> Shim:
    """Return the kernels of Hopper; skips what needs --full."""
    if reason := why_not():
        pytest.skip(reason)
    if shape in MORE_WIDE and not config.getoption("--full"):
        pytest.skip("a compile of several seconds: with --full")
    return shim(*shape, gpu=HOPPER)


@pytest.mark.parametrize("wide_shape", WIDE + MORE_WIDE, ids=str)
@pytest.mark.parametrize("window", [None, 24, 130])
@pytest.mark.parametrize("batch", ["a prompt", "chunks", "split prompts", "wide"])
def test_many_rows_on_hopper(
    wide_shape: tuple[int, torch.dtype],
    batch: str,
    window: int | None,
    pytestconfig: pytest.Config,
) -> None:
    lens = BATCHES.get(batch, [(300, 300), (64, 64), (129, 128), (513, 33)])
    serving = wide(wide_shape, pytestconfig)
    it = scene(lens, head_dim=wide_shape[0], dtype=wide_shape[1])
    check(it, window, serving)
    it = scene(lens, head_dim=wide_shape[0], dtype=wide_shape[1], num_heads=6, block_size=64)
    check(it, window, serving, cap=3.0, sinks=sinks_of(it))


@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(4, 4, 8), (8, 1, 32), (20, 1, 16)])
def test_shared_heads_and_blocks_on_hopper(
    heads: int, kv_heads: int, block_size: int, pytestconfig: pytest.Config
) -> None:
    serving = wide(WIDE[0], pytestconfig)
    it = scene(
        [(150, 80), (90, 1), (3, 3)],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        dtype=BF16,
        block_size=block_size,
    )
    check(it, None, serving)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("late", [False, True])
def test_any_order_of_threads_and_copies_gives_the_same(order: int, late: bool) -> None:
    if reason := why_not():
        pytest.skip(reason)
    it = scene([(70, 33), (300, 1)], head_dim=64, dtype=BF16)
    check(it, 24, shim(64, BF16, order, late))


@pytest.mark.parametrize("name", CUDA_BACKENDS)
def test_append_and_move_are_bit_for_bit(name: str) -> None:
    check_moves(backend(name, 64, BF16), BF16, device="cuda" if name == "cuda" else "cpu")


@pytest.mark.parametrize("name", ["reference", "cpu", "shim"])
def test_a_pool_may_have_more_elements_than_32_bits_count(name: str) -> None:
    serving = backend(name, 64, BF16)
    check_moves(serving, BF16, is_far=True)
    check(scene([(40, 20), (70, 1)], head_dim=64, dtype=BF16, is_far=True), None, serving)


@pytest.mark.parametrize("held", launch.POOL_DTYPES, ids=str)
@pytest.mark.parametrize("sent", launch.DTYPE_NAMES, ids=str)
@pytest.mark.parametrize("name", CUDA_BACKENDS)
def test_conversions_are_those_of_torch(name: str, held: torch.dtype, sent: torch.dtype) -> None:
    serving = backend_named(name, every_move)
    device = "cuda" if name == "cuda" else "cpu"
    generator = torch.Generator().manual_seed(7)
    pool = torch.randn(3, 2, 2, 2, 8, 16, generator=generator).to(held)
    # Ties, subnormal, too large for fp8, too large for fp16, infinite: each in its place.
    odd = [1.0625, 1.1875, 2.0**-10, 2.0**-9 * 1.5, 449.0, 465.0, 1e5, -1e5, float("inf"), -0.0]
    pool.view(-1)[: len(odd)] = torch.tensor(odd).to(held)
    table, layers, tokens, heads = [2, 0, 1], range(2), range(3, 21), range(2)
    want = reference.pack_kv(pool, table, layers, tokens, sent, heads)
    got = serving.pack_kv(pool.to(device), table, layers, tokens, sent, heads).cpu()
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)
    pools = [torch.zeros_like(pool), torch.zeros_like(pool, device=device)]
    reference.unpack_kv(pools[0], table, layers, tokens, want, heads)
    serving.unpack_kv(pools[1], table, layers, tokens, want.to(device), heads)
    torch.testing.assert_close(pools[1].cpu(), pools[0], rtol=0, atol=0, equal_nan=True)


@cache
def every_move() -> Shim:
    """Return all of kv.cu."""
    names = [
        name
        for held in launch.POOL_DTYPES
        for sent in launch.DTYPE_NAMES
        for name in kv_kernels(held, sent)
    ]
    return Shim({"kv": list(dict.fromkeys(names))})


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", launch.POOL_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
def test_heads_are_normed_rotated_and_appended(
    name: str, dtype: torch.dtype, head_dim: int, is_normed: bool
) -> None:
    if name == "shim" and (reason := why_not()):
        pytest.skip(reason)
    serving = every_move() if name == "shim" else backend(name, head_dim, dtype)
    device = "cuda" if name == "cuda" else "cpu"
    for num_tokens, heads in ((0, (4, 2)), (1, (7, 1)), (3, (9, 3)), (21, (4, 4)), (70, (6, 2))):
        sizes = dtype, head_dim, num_tokens, heads
        assert heads_error(serving, *sizes, is_normed=is_normed, device=device) <= 1, sizes


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 7, 64, 130, 4097])
def test_rows(name: str, dtype: torch.dtype, size: int) -> None:
    serving, device = backend(name, 64, dtype), "cuda" if name == "cuda" else "cpu"
    generator = torch.Generator().manual_seed(size)
    x, added = (torch.randn(3, size, generator=generator).to(dtype) * 3 for _ in range(2))
    weight = torch.randn(size, generator=generator)
    limit = {FP32: 1e-5, BF16: 1e-2, FP16: 2e-3}[dtype]

    def normed(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.double()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    got = serving.rms_norm(x.to(device), weight.to(device), 1e-5).cpu()
    torch.testing.assert_close(got.double(), normed(x), rtol=limit, atol=limit)
    total = x.clone().to(device)
    got = serving.add_rms_norm(total, added.to(device), weight.to(device), 1e-5).cpu()
    assert torch.equal(total.cpu(), x + added)
    torch.testing.assert_close(got.double(), normed(x + added), rtol=limit, atol=limit)
    both = torch.cat((x, added), dim=1)
    both[0, 0] = -300.0  # whose exponential overflows
    wide = both.double()
    want = wide[:, :size] * torch.sigmoid(wide[:, :size]) * wide[:, size:]
    got = serving.gate(both.to(device), SILU).cpu()
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)
    want = gelu(wide[:, :size], approximate="tanh") * wide[:, size:]
    got = serving.gate(both.to(device), GELU_TANH).cpu()
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)
    want = clamped(*(wide * 4).chunk(2, dim=1))
    got = serving.gate((both * 4).to(device), CLAMPED).cpu()
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)
