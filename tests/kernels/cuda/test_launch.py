"""Launches: refusals, structs as in the sources, widths of loads, threads, grids."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

import pytest
import torch

from kernels import GELU_TANH, SILU, KernelError, PagedBatch, Softmax
from kernels.contract import Backend
from kernels.cuda import backend as cuda
from kernels.cuda import launch
from kernels.cuda.device_copies import PIECES
from kernels.cuda.launch import Launch
from tests.kernels.instances import rowwise_kernels
from tests.kernels.rowwise_scenes import SIZES, check_all, compare
from tests.kernels.scenes import scene
from tests.kernels.shim.backend import GPU, Shim, why_not

KINDS = {"int": ctypes.c_int, "float": ctypes.c_float, "u64": ctypes.c_void_p}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        ((2, 1, 2, 1, 12, 64), torch.bfloat16, "block_size is 12"),
        ((2, 1, 2, 1, 4, 64), torch.bfloat16, "block_size is 4"),
        ((2, 1, 2, 1, 16, 20), torch.bfloat16, "head_dim is 20"),
        ((2, 1, 2, 1, 16, 264), torch.bfloat16, "head_dim is 264"),
        ((2, 1, 2, 1, 16, 64), torch.float64, "torch.float64"),
    ],
)
def test_a_pool_that_no_kernel_serves(
    shape: tuple[int, ...], dtype: torch.dtype, says: str
) -> None:
    with pytest.raises(KernelError, match=says):
        launch.check_pool(torch.zeros(shape, dtype=dtype))


def test_a_field_that_a_kernel_does_not_have_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match="eps"):
        launch.MOVE().eps = 1.0
    with pytest.raises(AttributeError, match="eps"):
        launch.MOVE(eps=1.0)


@pytest.mark.parametrize(
    ("source", "name", "struct"),
    [
        ("attention", "Attention", launch.ATTENTION),
        ("kv", "Heads", launch.HEADS),
        ("kv", "Move", launch.MOVE),
        ("rowwise", "Norm", launch.NORM),
        ("rowwise", "Gate", launch.GATE),
        ("device_copies", "Pieces", PIECES),
    ],
)
def test_the_structs_are_those_of_the_source(
    source: str, name: str, struct: type[ctypes.Structure]
) -> None:
    found = re.search(rf"struct {name} {{(.*?)}};", cuda.source_text(source), re.S)
    assert found is not None
    fields = []
    for declared in re.sub(r"//.*", "", found[1]).split(";")[:-1]:
        kind = ctypes.c_void_p if "*" in declared else KINDS[declared.split()[0]]
        fields += [(field, kind) for field in re.findall(r"(\w+)\s*(?:,|$)", declared)]
    assert struct._fields_ == fields


def fields(it: Launch) -> dict[str, float | None]:
    return {name: getattr(it.arguments, name) for name, *_ in it.arguments._fields_}


def test_layers_share_all_of_attention_but_what_is_their_own() -> None:
    it = scene([(900, 40), (30, 1)], dtype=BF16, head_dim=64)

    def attend(layer: int, **changes: Any) -> list[Launch]:
        softmax = Softmax(0.125)._replace(**changes)
        out = torch.empty_like(it.query)
        return launch.attention(it.query, it.pool, layer, it.batch, softmax, out, GPU)

    first, second = attend(0), attend(1, sinks=torch.zeros(4))
    assert [each.kernel.partition("<")[0] for each in first] == ["attend", "attend"]
    for one, other in zip(first, second, strict=True):
        assert one[:5] == other[:5]
        differing = {name for name, value in fields(one).items() if fields(other)[name] != value}
        assert differing == {"layer", "out", "sinks"}
    for name, value in (("scale", 0.5), ("window", 7), ("cap", 30.0)):
        changed = attend(0, **{name: value})
        assert fields(changed[0])[name] != fields(first[0])[name]


@cache
def shim(order: int = 2) -> Backend:
    if reason := why_not():
        pytest.skip(reason)
    names = [name for dtype in launch.POOL_DTYPES for name in rowwise_kernels(dtype)]
    return Shim({"rowwise": names}, order=order)


@pytest.mark.parametrize("dtype", launch.POOL_DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_those_of_the_formula(dtype: torch.dtype, size: int) -> None:
    check_all(shim(), dtype, size)


@pytest.mark.parametrize("order", [0, 1])
def test_any_order_of_threads_gives_the_same(order: int) -> None:
    check_all(shim(order), BF16, 4104)


@pytest.mark.parametrize("dtype", launch.POOL_DTYPES, ids=str)
def test_a_gate_of_values_whose_exponential_overflows(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e4]])
    gate_up = torch.cat((gate, torch.full_like(gate, 2)), dim=1).to(dtype)
    for activation in (SILU, GELU_TANH):
        compare(shim().gate(gate_up, activation), 2 * gate_up[:, :8].double().clamp(min=0))


@pytest.mark.parametrize(
    ("dtype", "size", "width", "threads"),
    [
        (BF16, 64, 8, 32),
        (BF16, 576, 8, 96),
        (FP16, 4096, 8, 512),
        (FP16, 8192, 8, 512),
        (FP32, 64, 4, 32),
        (FP32, 2, 1, 32),
        (BF16, 4097, 1, 512),
    ],
)
def test_a_norm_reads_as_much_at_once_as_rows_allow(
    dtype: torch.dtype, size: int, width: int, threads: int
) -> None:
    x = torch.zeros(2, 3, size, dtype=dtype)
    (it,) = launch.norm(x, torch.ones(size), 1e-6, x.clone())
    assert it.kernel == f"rms_norm<{launch.DTYPE_NAMES[dtype]},{width}>"
    assert (it.grid, it.threads, it.shared_bytes) == ((6, 1), threads, threads // 32 * 4)


@pytest.mark.parametrize("which", range(4))
def test_one_tensor_off_the_boundary_makes_every_load_narrow(which: int) -> None:
    whole = [torch.zeros(1 + 4 * 64, dtype=BF16) for _ in range(3)]
    whole.append(torch.zeros(1 + 4 * 64))
    rows = [run[number == which :][: 4 * 64].view(4, 64) for number, run in enumerate(whole)]
    x, y, out, weight = rows
    (it,) = launch.norm(x, weight[0], 1e-6, out, y)
    assert it.kernel == "rms_norm<bf16,1>"


@pytest.mark.parametrize(
    ("rows", "size", "grid", "threads"),
    [
        (1, 64, (1, 1), 32),
        (5, 4104, (3, 5), 256),
        (100, 4104, (3, 8), 256),
        (100, 8, (1, 24), 32),
        (100, 1 << 20, (512, 1), 256),
    ],
)
def test_a_gate_takes_rows_in_turns(
    rows: int, size: int, grid: tuple[int, int], threads: int
) -> None:
    gate_up = torch.empty(rows, 2 * size, dtype=BF16, device="meta")
    out = torch.empty(rows, size, dtype=BF16, device="meta")
    (it,) = launch.gate(gate_up, out, SILU, wanted_blocks=24)
    assert (it.kernel, it.grid, it.threads) == ("gate<bf16,8>", grid, threads)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "width", "lanes", "blocks"),
    [
        (BF16, 128, 8, 8, 5),
        (FP16, 80, 8, 8, 5),
        (FP16, 24, 4, 4, 3),
        (BF16, 8, 4, 1, 1),
        (FP32, 128, 4, 16, 9),
        (FP32, 256, 4, 32, 18),
    ],
)
def test_a_head_is_read_by_as_many_threads_as_it_has_whole_loads(
    dtype: torch.dtype, head_dim: int, width: int, lanes: int, blocks: int
) -> None:
    (it,) = heads_launch(torch.zeros(6, 12, head_dim, dtype=dtype))
    name = launch.DTYPE_NAMES[dtype]
    assert (it.kernel, it.threads) == (f"rotate_and_append<{name},{width}>", 128)
    assert (it.arguments.lanes, it.grid) == (lanes, (blocks, 1))


def heads_launch(heads: torch.Tensor, rotation: torch.Tensor | None = None) -> list[launch.Launch]:
    """Launch heads of which two are keys and two values."""
    num_tokens, num_rows, head_dim = heads.shape
    pool = torch.zeros(2, 1, 2, 2, 8, head_dim, dtype=heads.dtype)
    none = torch.zeros(0, dtype=torch.int32)
    batch = PagedBatch(torch.zeros(num_tokens, dtype=torch.int32), none, none, none)
    rotation = torch.zeros(num_tokens, 2, head_dim // 2) if rotation is None else rotation
    query = heads.new_zeros(num_tokens, num_rows - 4, head_dim)
    return launch.rotate_and_append(heads, rotation, pool, 0, batch, query)


def test_heads_that_no_kernel_reads() -> None:
    heads = torch.zeros(5, 9, 16, dtype=BF16)
    for lying, says in (
        (heads.mT.contiguous().mT, r"heads are torch.bfloat16 with strides \(144, 1, 9\), not"),
        (heads[:, :, ::2], "heads are torch.bfloat16 with strides"),
        (torch.zeros(5 * 9 * 16 + 4, dtype=BF16)[4:].view(5, 9, 16), "begin at a multiple of 16"),
        (torch.zeros(5, 9 * 16 + 4, dtype=BF16)[:, : 9 * 16].view(5, 9, 16), "multiple of 16"),
    ):
        with pytest.raises(KernelError, match=says):
            heads_launch(lying)
    with pytest.raises(KernelError, match=r"rotation is torch\.float64"):
        heads_launch(heads, torch.zeros(5, 2, 8).double())


def test_no_rows_launch_nothing() -> None:
    none = torch.zeros(0, 16)
    assert heads_launch(torch.zeros(0, 8, 16)) == []
    assert launch.norm(none, torch.ones(16), 1e-6, none) == []
    assert launch.gate(none, torch.zeros(0, 8), SILU, wanted_blocks=24) == []


def test_what_is_refused() -> None:
    x, weight = torch.zeros(4, 6), torch.ones(6)
    with pytest.raises(KernelError, match=r"rows are torch\.float64, not float32"):
        launch.norm(x.double(), weight, 1e-6, x)
    with pytest.raises(KernelError, match=r"weight is torch\.float16 \[6\], not torch\.float32"):
        launch.norm(x, weight.half(), 1e-6, x)
    with pytest.raises(KernelError, match=r"y is torch\.float32 \[3, 6\], not .* \[4, 6\]"):
        launch.norm(x, weight, 1e-6, x, x[1:])
    with pytest.raises(KernelError, match="x is not contiguous"):
        launch.norm(torch.zeros(6, 4).T, weight, 1e-6, x)
    with pytest.raises(KernelError, match=r"gate_up is torch\.float32 \[4, 6\], not .* \[4, 4\]"):
        launch.gate(x, torch.zeros(4, 2), SILU, wanted_blocks=24)


def test_attention_takes_scales_above_0() -> None:
    it = scene([(5, 5)], head_dim=64, dtype=BF16)
    with pytest.raises(KernelError, match=r"scale is -0\.1, not above 0"):
        launch.attention(it.query, it.pool, 0, it.batch, Softmax(-0.1), it.query, GPU)
