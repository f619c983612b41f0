"""Arguments that do not fit are refused before anything is written; the import stays light."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

import kernels
from kernels import SILU, KernelError, PagedBatch, Rectangle, ShapeError, Softmax
from kernels.contract import segment_shape

NUM_BLOCKS, NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 4, 2, 2, 8, 6


def pool() -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)


def batch(**changes: Any) -> PagedBatch:
    arrays = {
        "slots": [3, 9, 10],
        "query_starts": [0, 1, 3],
        "context_lens": [4, 3],
        "block_tables": [[0], [1]],
    }
    return PagedBatch(
        **{name: torch.tensor(values, dtype=torch.int32) for name, values in arrays.items()}
        | changes
    )


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, kernels; print(kernels.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.2.0", "False"]


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(KernelError, match="'tpu'"):
        kernels.backend_of("tpu")


def rotate_and_append(
    target: torch.Tensor,
    layer: int = 0,
    heads: tuple[int, ...] = (3, 8, 6),
    rotation: tuple[int, ...] = (3, 2, 3),
    norm: tuple[int, ...] = (6, 6),
) -> torch.Tensor:
    """Give heads of ones: four of queries, two of keys and two of values fit."""
    tensors = torch.ones(heads), torch.ones(rotation)
    return kernels.rotate_and_append(*tensors, target, layer, batch(), torch.ones(norm), 1e-6)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"heads": (3, 8, 5)}, r"heads are \(3, 8, 5\), not .* = \[3, Hq \+ 4, 6\]"),
        ({"heads": (2, 8, 6)}, "heads are"),
        ({"heads": (3, 48)}, "heads are"),
        ({"heads": (3, 4, 6)}, "0 query heads do not share 2 KV heads"),
        ({"heads": (3, 2, 6)}, "-2 query heads"),
        ({"heads": (3, 7, 6)}, "3 query heads do not share 2 KV heads"),
        ({"rotation": (3, 2, 2)}, r"rotation is \(3, 2, 2\)"),
        ({"norm": (8, 6)}, r"norm is \(8, 6\), not \[Hq \+ Hkv, D\] = \(6, 6\)"),
    ],
)
def test_heads_that_do_not_fit_are_refused(shapes: dict[str, Any], words: str) -> None:
    target = pool()
    assert rotate_and_append(target).shape == (3, 4, 6)
    target.zero_()
    with pytest.raises(ShapeError, match=words):
        rotate_and_append(target, **shapes)
    assert not target.any()


def test_a_tensor_that_is_no_pool_and_a_layer_outside_it_are_refused() -> None:
    with pytest.raises(ShapeError, match="pool"):
        rotate_and_append(torch.zeros(4, 2, 3, 2, 8, 6))
    for layer in (-1, NUM_LAYERS):
        with pytest.raises(ShapeError, match="layer"):
            rotate_and_append(pool(), layer)


@pytest.mark.parametrize(
    ("query", "changes", "softmax", "words"),
    [
        ((3, 4, 5), {}, {}, "query"),
        ((2, 4, 6), {}, {}, "query"),
        ((3, 3, 6), {}, {}, "query heads"),
        ((3, 0, 6), {}, {}, "query heads"),
        ((3, 4, 6), {"query_starts": ints(0, 3)}, {}, "query_starts"),
        ((3, 4, 6), {"block_tables": ints(0, 1)}, {}, "block_tables"),
        ((3, 4, 6), {}, {"window": 0}, "window"),
        ((3, 4, 6), {}, {"cap": 0.0}, "cap is 0.0"),
        ((3, 4, 6), {}, {"cap": math.inf}, "cap is inf"),
        ((3, 4, 6), {}, {"cap": math.nan}, "cap is nan"),
        ((3, 4, 6), {}, {"sinks": torch.ones(3)}, r"sinks are torch.float32 \[3\]"),
        ((3, 4, 6), {}, {"sinks": torch.ones(4, 1)}, r"sinks are torch.float32 \[4, 1\]"),
        ((3, 4, 6), {}, {"sinks": torch.ones(4).bfloat16()}, "sinks are torch.bfloat16"),
        ((3, 4, 6), {}, {"sinks": torch.ones(8)[::2]}, "in one run"),
    ],
)
def test_attention_refuses_what_does_not_fit(
    query: tuple[int, ...], changes: dict[str, Any], softmax: dict[str, Any], words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        weights = Softmax(1.0, **softmax)
        kernels.paged_attention(torch.ones(query), pool(), 0, batch(**changes), weights)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": range(0, 3)}, "layers"),
        ({"layers": range(1, 1)}, "layers"),
        ({"tokens": range(4, 4)}, "tokens"),
        ({"tokens": range(-1, 4)}, "tokens"),
        ({"tokens": range(0, 17)}, "beyond"),
        ({"table": [0, 4]}, "outside"),
        ({"table": [-1, 1]}, "outside"),
        ({"heads": range(NUM_KV_HEADS + 1)}, "heads"),
        ({"heads": range(1, 1)}, "heads"),
        ({"heads": range(-1, 1)}, "heads"),
    ],
)
def test_a_rectangle_outside_is_refused(changes: dict[str, Any], words: str) -> None:
    target, part = pool(), {"layers": range(2), "tokens": range(9), "heads": range(2)} | changes
    table, rectangle = part.pop("table", [0, 1]), Rectangle(**part)
    with pytest.raises(ShapeError, match=words):
        kernels.pack_kv(target, table, rectangle)
    segment = torch.ones(segment_shape(target, rectangle))
    with pytest.raises(ShapeError, match=words):
        kernels.unpack_kv(target, table, rectangle, segment)
    assert not target.any()


def test_only_the_blocks_that_are_read_need_to_exist() -> None:
    segment = kernels.pack_kv(
        pool(), [99, 1, 99], Rectangle(range(0, 1), range(NUM_KV_HEADS), range(8, 16))
    )
    assert segment.shape == (1, 2, NUM_KV_HEADS, 8, HEAD_DIM)


def test_a_segment_of_another_shape_is_refused() -> None:
    target = pool()
    with pytest.raises(ShapeError, match="segment"):
        rectangle = Rectangle(range(0, 1), range(2), range(0, 3))
        kernels.unpack_kv(target, [0], rectangle, torch.ones(1, 2, 2, 4, 6))
    assert not target.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": (3, 9)}, "x, gate_up and down are"),
        ({"gate_up": (5, 6, 8)}, "x, gate_up and down are"),
        ({"shares": (3, 1)}, "not both"),
        ({"experts": (4, 2), "shares": (4, 2)}, "T = 3"),
        ({"gate_up_bias": (5, 6)}, "biases are"),
        ({"down_bias": (5, 9)}, "biases are"),
    ],
)
def test_experts_of_other_shapes_are_refused(
    wrong: dict[str, tuple[int, ...]], message: str
) -> None:
    shapes = {"x": (3, 8), "experts": (3, 2), "shares": (3, 2), "gate_up": (5, 12, 8)}
    shapes |= {"down": (5, 8, 6), "gate_up_bias": (5, 12), "down_bias": (5, 8)} | wrong
    tensors: dict[str, Any] = {name: torch.zeros(shape) for name, shape in shapes.items()}
    biases = tensors.pop("gate_up_bias"), tensors.pop("down_bias")
    with pytest.raises(ShapeError, match=message):
        kernels.expert_mlp(**tensors, activation=SILU, biases=biases)


@pytest.mark.parametrize(
    ("shape", "settings", "allowed", "says"),
    [
        ((2, 0), None, None, "0 tokens, not 1 to"),
        ((1, (1 << 21) + 1), None, None, "not 1 to 2097152"),
        ((2, 9), torch.zeros(2, 4, dtype=torch.int64), None, r"settings is .*\[2, 4\], not"),
        ((2, 9), torch.zeros(2, 5), None, "settings is torch.float32"),
        ((2, 9), None, torch.zeros(3, 1, dtype=torch.int32), r"allowed is .*\[3, 1\], not"),
        ((2, 9), None, torch.zeros(4, 2, dtype=torch.int32)[::2], "allowed is not contiguous"),
    ],
)
def test_what_does_not_fit_the_logits_is_refused(
    shape: tuple[int, int],
    settings: torch.Tensor | None,
    allowed: torch.Tensor | None,
    says: str,
) -> None:
    with pytest.raises(ShapeError, match=says):
        kernels.draw(torch.empty(shape), settings, allowed)
