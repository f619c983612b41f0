"""What the host refuses, and that its structs are those of the kernels."""

import re

import pytest
import torch

from kernels import KernelError, cuda, launch, launch_rowwise


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


@pytest.mark.parametrize(
    ("source", "name", "struct"),
    [
        ("attention", "Attention", launch.ATTENTION),
        ("kv", "Append", launch.APPEND),
        ("kv", "Move", launch.MOVE),
        ("rowwise", "Norm", launch_rowwise.NORM),
        ("rowwise", "Gate", launch_rowwise.GATE),
    ],
)
def test_the_structs_have_the_fields_of_the_source(source: str, name: str, struct: object) -> None:
    found = re.search(rf"struct {name} {{(.*?)}};", cuda.source_text(source), re.S)
    assert found is not None
    text = re.sub(r"//.*", "", found[1])
    fields = [
        re.sub(r".*[ *]", "", part.strip())
        for line in text.split(";")
        for part in line.split(",")
        if part.strip()
    ]
    assert tuple(fields) == struct.names  # type: ignore[attr-defined]
