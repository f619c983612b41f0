"""Without a GPU: the errors say what is missing, and the sources are whole."""

import inspect
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels import KernelError
from kernels.cuda import backend as cuda
from kernels.cuda import launch
from kernels.cuda.launch import Launch
from tests.kernels import draw_scenes
from tests.kernels.rowwise_scenes import check_all
from tests.kernels.scenes import check, check_moves, scene
from tests.kernels.shim.cupy import CONTEXTS, STREAMS, Cupy, standing_in
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


def test_compiled_kernels_are_kept_where_no_other_user_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with standing_in(Cupy()):
        cuda.start(torch.device("cuda", 0), a_norm())
    place = Path(os.environ["CUPY_CACHE_DIR"])
    assert place.is_relative_to(tmp_path) and place.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("CUPY_CACHE_DIR", "/another")
    with standing_in(Cupy()):
        cuda.start(torch.device("cuda", 0), a_norm())
    assert os.environ["CUPY_CACHE_DIR"] == "/another"


def test_what_is_called_of_cupy_is_there() -> None:
    """As the stand-in has it, which the other tests run."""
    cupy = pytest.importorskip("cupy", reason="needs cupy: pip install 'baton-serve[cuda]'")
    documented = re.findall(r"(\w+)[,)]", cupy.cuda.driver.launchKernel.__doc__)
    assert documented == list(inspect.signature(Cupy().launchKernel).parameters)
    called = (cupy.cuda.Device, cupy.cuda.runtime.free, cupy.cuda.driver.ctxGetCurrent)
    assert all(map(callable, (*called, cupy.cuda.driver.ctxSetCurrent, cupy.RawModule)))
    assert cupy.RawKernel.kernel and cupy.cuda.Function.ptr


def test_operators_start_their_kernels(cupy: Cupy) -> None:
    """On the current stream, whose work comes in the order of the calls."""
    check_moves(cuda, torch.float32)
    check_all(cuda, torch.float32, 576)
    for lens in ([(37, 37)], [(900, 40)]):  # the latter with keys that are split
        check(scene(lens, head_dim=64, dtype=torch.bfloat16), None, cuda)
    draw_scenes.check(cuda, torch.randn(3, 40), draw_scenes.settings_of(3, 1, top_p=0.9))
    assert {(device, stream) for device, stream, _ in cupy.launched} == {(0, STREAMS[0])}
    names = {name.partition("<")[0] for *_, name in cupy.launched}
    assert names == {"rotate_and_append", "move", "rms_norm", "gate", "attend", "draw"}


def a_norm() -> list[Launch]:
    row = torch.ones(1, 8)
    return launch.norm(row, row[0], 0.0, torch.empty_like(row))


def test_a_launch_goes_to_its_own_device_and_leaves_the_current_one(cupy: Cupy) -> None:
    for current in (0, 1):
        for index in (0, 1):
            with cupy.Device(current):
                cuda.start(torch.device("cuda", index), a_norm())
                assert cupy.ctxGetCurrent() == CONTEXTS[current]
    launched = [(device, stream) for device, stream, _ in cupy.launched]
    assert launched == [*enumerate(STREAMS)] * 2


def test_a_launch_goes_to_the_stream_that_is_current_by_then(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = iter([7, 8, 7])  # the one in between is being recorded
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: next(streams))  # noqa: SLF001
    for _ in range(3):
        cuda.start(torch.device("cuda", 0), a_norm())
    assert [stream for _, stream, _ in cupy.launched] == [7, 8, 7]


def test_a_thread_that_is_new_to_cuda_can_start_a_kernel(cupy: Cupy) -> None:
    cuda.start(torch.device("cuda", 0), a_norm())
    with ThreadPoolExecutor(1) as thread:
        thread.submit(cuda.start, torch.device("cuda", 0), a_norm()).result()
    assert len(cupy.launched) == 2


def test_all_but_the_first_launch_of_a_kernel_are_one_call_of_the_driver(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.start(torch.device("cuda", 0), a_norm())
    monkeypatch.setattr(cuda, "import_module", None)
    monkeypatch.setattr(torch.cuda, "current_stream", None)  # makes an object
    with cupy.Device(0):
        cupy.calls.clear()
        cuda.start(torch.device("cuda", 0), 2 * a_norm())
        assert cupy.calls == ["ctxGetCurrent", "launchKernel", "launchKernel"]


def test_the_kernel_that_cannot_be_started_is_the_last_one_noted(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = a_norm()[0], a_norm()[0]._replace(shared_bytes=1 << 20)

    def fail(*arguments: int) -> None:
        if second.shared_bytes in arguments:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")

    monkeypatch.setattr(cuda, "_started", {})
    monkeypatch.setattr(cupy, "launchKernel", fail)
    assert cuda.last_started(1) is None
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        cuda.start(torch.device("cuda", 1), [first, second])
    assert cuda.last_started(1) == second.kernel
    assert cupy.ctxGetCurrent() == 0  # as before
