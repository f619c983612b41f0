"""The device is the one named, or the best that everything is there for; what lacks is said."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

from kernels import KernelError
from kernels.cpu.intrinsics import target_name
from kernels.cuda import backend as cuda
from worker.compute.device import arithmetic_of, find_device
from worker.model.config import ModelError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Torch sees a GPU that everything is there for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "require_device", lambda index: None)
    return monkeypatch


def refuse(index: int) -> None:
    raise KernelError(f"cupy is not installed, GPU {index} or not")


def test_a_device_that_is_named() -> None:
    assert find_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu9", "meta", "cuda:-1", ""])
def test_a_name_of_nothing(name: str) -> None:
    with pytest.raises(ModelError, match="not auto, cpu, cuda or cuda:N"):
        find_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"'cuda': no GPU: .* install a CUDA build"):
        find_device("cuda")
    assert find_device("auto") == torch.device("cpu")


def test_a_gpu_that_is_there_is_taken(gpu: pytest.MonkeyPatch) -> None:
    assert find_device("auto") == torch.device("cuda")
    assert find_device("cuda:1") == torch.device("cuda", 1)


def test_a_gpu_that_something_lacks_is_passed_over_and_said(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(cuda, "require_device", refuse)
    with capture_logs() as logs:
        assert find_device("auto") == torch.device("cpu")
    assert [entry["reason"] for entry in logs] == ["cupy is not installed, GPU 0 or not"]
    with pytest.raises(ModelError, match="cupy is not installed, GPU 1"):
        find_device("cuda:1")


def test_what_computes_has_a_name_of_processor_and_formats(gpu: pytest.MonkeyPatch) -> None:
    cpu, bfloat16 = torch.device("cpu"), torch.bfloat16
    assert arithmetic_of(cpu, bfloat16) == f"cpu {target_name()} bfloat16"
    assert arithmetic_of(cpu, bfloat16) != arithmetic_of(cpu, torch.float32)
    gpu.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert arithmetic_of(torch.device("cuda", 1), bfloat16) == "cuda GPU of cuda:1 bfloat16"
