"""Without a GPU: the errors say what is missing, and the sources are whole."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from kernels import KernelError
from kernels.cuda import backend as cuda
from kernels.cuda import launch
from kernels.cuda.launch import MOVE, Launch
from tests.kernels.rowwise_scenes import check_all
from tests.kernels.scenes import check, check_moves, scene
from tests.kernels.shim.backend import GPU
from tests.kernels.shim.cupy import MULTIPROCESSORS, STREAMS, Cupy
from tests.kernels.shim.cupy import cupy as cupy


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_with_what_to_do() -> None:
    with pytest.raises(KernelError, match=r"no GPU: .* install a CUDA build .* --device cpu"):
        cuda.require_device()


def test_too_old_a_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(KernelError, match="no GPU 3: torch sees 1"):
        cuda.require_device(3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old One")
    with pytest.raises(KernelError, match=r"Old One has compute capability 7\.5"):
        cuda.require_device()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setitem(sys.modules, "cupy", None)
    cuda._cupy.cache_clear()  # noqa: SLF001
    with pytest.raises(KernelError, match=r"pip install 'baton-serve\[cuda\]'"):
        cuda.require_device()


def test_torch_s_stream_becomes_cupy_s_without_a_warning() -> None:
    """Warnings are errors in our tests, and CuPy 14.2 warns of the older way."""
    cupy = pytest.importorskip("cupy", reason="needs cupy: pip install 'baton-serve[cuda]'")
    assert cupy.cuda.Stream.from_external(cuda.ExternalStream(12345)).ptr == 12345


def test_a_source_holds_its_header_once() -> None:
    for source in ("attention", "kv", "rowwise"):
        text = cuda.source_text(source)
        assert "prims.cuh" not in text and text.count("PRIM void copies_commit") == 1


def test_operators_start_their_kernels(cupy: Cupy) -> None:
    """On the current stream, whose work comes in the order of the calls."""
    check_moves(cuda, torch.float32)
    check_all(cuda, torch.float32, 576)
    for lens in ([(37, 37)], [(900, 40)]):  # the latter with keys that are split
        check(scene(lens, head_dim=64, dtype=torch.bfloat16), None, cuda)
    assert {(device, stream) for device, stream, _ in cupy.launched} == {(0, STREAMS[0])}
    names = {name.partition("<")[0] for *_, name in cupy.launched}
    assert names == {"append", "move", "rms_norm", "gate", "attend"}


def test_a_launch_goes_to_its_own_device(cupy: Cupy) -> None:
    row = torch.ones(1, 8)
    cuda.start(torch.device("cuda", 1), launch.norm(row, row[0], 0.0, torch.empty_like(row)))
    assert [(device, stream) for device, stream, _ in cupy.launched] == [(1, STREAMS[1])]


def test_what_a_device_has_for_tiles(cupy: Cupy) -> None:
    assert [cuda.gpu(index) for index in (0, 1)] == [
        GPU._replace(multiprocessors=n) for n in MULTIPROCESSORS
    ]


def test_the_kernel_that_cannot_be_started_is_the_last_one_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    functions = {"first": lambda *_, **__: None, "second": fail}
    monkeypatch.setattr(cuda, "_started", {})
    monkeypatch.setattr(cuda, "_cupy", MagicMock())
    monkeypatch.setattr(cuda, "_function", lambda source, kernel, *_: functions[kernel])
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert cuda.last_started(3) is None
    launches = [Launch("kv", it, (1, 1), 32, 0, np.zeros(1, MOVE)) for it in functions]
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        cuda.start(torch.device("cuda", 3), launches)
    assert cuda.last_started(3) == "second"
