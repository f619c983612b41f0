"""NVRTC compiles every kernel for every architecture: registers, no spills, the instructions.

No GPU is needed.  What this cannot say: whether the kernels are right or fast on one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from itertools import product
from pathlib import Path

import pytest
import torch

from kernels.cuda import backend as cuda
from kernels.cuda import launch, tiling
from tests.kernels.instances import (
    SAMPLING_KERNELS,
    SHARED_BYTES,
    attention_kernels,
    kv_kernels,
    rowwise_kernels,
    wide_kernels,
)
from tests.kernels.shim.backend import cuda_headers

TILED = [(d, t) for d in launch.TILED_HEAD_DIMS for t in launch.TILED_DTYPES]
DEFAULT = [(64, launch.TILED_DTYPES[0]), (128, launch.TILED_DTYPES[1])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--full")
        metafunc.parametrize("architecture", SHARED_BYTES if is_full else ["sm_89"])


def nvrtc() -> ctypes.CDLL:
    """Load the library of the wheel; skips where there is none."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec and spec.submodule_search_locations) or ():
        library = Path(place) / "cu13/lib/libnvrtc.so.13"
        if library.exists() and cuda_headers():
            ctypes.CDLL(str(library.with_name("libnvrtc-builtins.so.13.0")), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    pytest.skip("NVRTC is not installed: pip install 'baton-serve[dev]'")


def compile_for(architecture: str, source: str, kernels: list[str]) -> tuple[bytes, str]:
    """Return (PTX, log of the assembler) of some instantiations."""
    library, program = nvrtc(), ctypes.c_void_p()
    text = cuda.source_text(source).encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"k.cu", 0, None, None) == 0
    for kernel in kernels:
        assert library.nvrtcAddNameExpression(program, kernel.encode()) == 0
    options = ["-std=c++17", f"-arch={architecture}", "--ptxas-options=-v"]
    options += [f"-I{place}" for place in cuda_headers()]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = library.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()[:3000]
    assert library.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    ptx = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetPTX(program, ptx) == 0
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value, log.value.decode()


def check_resources(log: str, num_kernels: int) -> None:
    """No spills, no stack, and few enough registers for two warps groups of 128 threads."""
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", log)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert len(spills) == len(registers) == num_kernels, log
    assert all(spill == ("0", "0", "0") for spill in spills), log
    assert max(registers) <= 255


def test_attention_compiles(architecture: str, pytestconfig: pytest.Config) -> None:
    shapes = TILED if pytestconfig.getoption("--full") else DEFAULT
    for head_dim, dtype in shapes:
        gpu = tiling.Gpu(1, SHARED_BYTES[architecture])
        kernels = attention_kernels(dtype, head_dim, gpu)
        ptx, log = compile_for(architecture, "attention", kernels)
        check_resources(log, len(kernels))
        for tile in (tiling.few_rows_tile(head_dim), tiling.many_rows_tile(head_dim, gpu)):
            mangled = "".join(f"Li{number}E" for number in (head_dim, *tile))
            used = re.search(rf"'_Z6attend\w+{mangled}\w*'.*?Used (\d+) registers", log, re.S)
            assert (
                used
                and int(used[1]) * tile.threads * gpu.blocks(tile, head_dim) <= tiling.REGISTERS
            )
        kind = b"bf16" if "bf16" in launch.DTYPE_NAMES[dtype] else b"f16"
        for instruction in (
            b"mma.sync.aligned.m16n8k16.row.col.f32." + kind,
            b"cp.async.cg.shared.global",
            b"ldmatrix.sync.aligned.m8n8.x4.trans",
        ):
            assert instruction in ptx


def test_attention_of_hopper_compiles() -> None:
    kernels = [
        k for d in tiling.WIDE_HEAD_DIMS for t in launch.TILED_DTYPES for k in wide_kernels(t, d)
    ]
    ptx, log = compile_for("sm_90a", "attention_hopper", kernels)
    check_resources(log, len(kernels))
    tile = tiling.WideTile()
    assert "wgmma" not in log, "ptxas says where it has to make products wait for each other"
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert set(registers) == {tile.registers(128)}
    # What the warpgroups then have together is no more than that.
    fewer, more = (
        int(re.findall(rb"setmaxnreg\.%b\.sync\.aligned\.u32\s+(\d+)" % kind, ptx)[0])
        for kind in (b"dec", b"inc")
    )
    assert 128 * fewer + 256 * more <= tile.registers(128) * tile.threads <= tiling.REGISTERS
    for instruction in (
        b"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
        b"wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
        b"cp.async.mbarrier.arrive.noinc",
        b"mbarrier.try_wait.parity",
        b"fence.proxy.async",
    ):
        assert instruction in ptx


def test_what_is_of_hopper_is_seen_by_no_other(architecture: str) -> None:
    (kernel,) = attention_kernels(launch.POOL_DTYPES[0], 64)
    for source in ("attention", "attention_hopper"):
        text = cuda.source_text(source)
        assert "wgmma" in text
    ptx, _ = compile_for(architecture, "attention", [kernel])
    assert b"wgmma" not in ptx and b"mbarrier" not in ptx
    with pytest.raises(AssertionError, match="attend_wide"):
        compile_for(architecture, "attention_hopper", ["attend_wide<bf16,64>"])


def test_the_rest_compiles(architecture: str) -> None:
    kernels = [f"attend_plain<{launch.DTYPE_NAMES[dtype]}>" for dtype in launch.POOL_DTYPES]
    check_resources(compile_for(architecture, "attention", kernels)[1], len(kernels))
    pairs = product(launch.POOL_DTYPES, launch.DTYPE_NAMES)
    names = list(dict.fromkeys(name for pair in pairs for name in kv_kernels(*pair)))
    check_resources(compile_for(architecture, "kv", names)[1], len(names))


@pytest.mark.parametrize("dtype", launch.POOL_DTYPES, ids=str)
def test_heads_are_read_and_written_sixteen_bytes_at_once(
    architecture: str, dtype: torch.dtype
) -> None:
    kernel = next(it for it in kv_kernels(dtype, dtype) if it.startswith("rotate_and_append"))
    ptx, log = compile_for(architecture, "kv", [kernel])
    check_resources(log, 1)
    # Ten thread blocks of 128, at least, on the 65536 registers of a multiprocessor.
    assert max(int(count) for count in re.findall(r"Used (\d+) registers", log)) <= 48
    # Two loads of the head; of float32 weights, cosines and sines as many as that takes.
    floats = 4 // dtype.itemsize
    assert len(re.findall(rb"ld\.global(?:\.nc)?\.v4\.", ptx)) == 2 + 4 * floats
    assert len(re.findall(rb"st\.global\.v4\.", ptx)) == 2


@pytest.mark.parametrize("dtype", launch.POOL_DTYPES, ids=str)
def test_rowwise_compiles(architecture: str, dtype: torch.dtype) -> None:
    kernels = rowwise_kernels(dtype)
    ptx, log = compile_for(architecture, "rowwise", kernels)
    check_resources(log, len(kernels))
    # Two blocks of 512 threads, at least, on the 65536 registers of a multiprocessor.
    assert max(int(count) for count in re.findall(r"Used (\d+) registers", log)) <= 64
    # The wide norm reads x, y, x again and the float32 weight; the wide gate reads gate and up.
    assert len(re.findall(rb"ld\.global\.v4\.", ptx)) >= 6
    assert len(re.findall(rb"st\.global\.v4\.", ptx)) == 3


def test_sampling_compiles(architecture: str) -> None:
    ptx, log = compile_for(architecture, "sampling", SAMPLING_KERNELS)
    check_resources(log, len(SAMPLING_KERNELS))
    # A block of 1024 threads on the 65536 registers of a multiprocessor.
    assert max(int(count) for count in re.findall(r"Used (\d+) registers", log)) <= 64
    # Native atomics in shared memory; and what decides a token is rounded as the CPU rounds it.
    assert b"atom.shared.add.u32" in ptx and b"atom.shared.cas" not in ptx
    assert b"mul.rn.f64" in ptx and not re.search(rb"cvt\.ftz\.f64\.f32", ptx)


def test_pieces_compile(architecture: str) -> None:
    ptx, log = compile_for(architecture, "device_copies", ["copy_pieces"])
    check_resources(log, 1)
    # All eight loads of a thread are under way before the first is waited for.
    loads = [at.start() for at in re.finditer(rb"ld\.global\.v2\.u64|ld\.global\.v4", ptx)]
    stores = [at.start() for at in re.finditer(rb"st\.global\.v2\.u64|st\.global\.v4", ptx)]
    assert (len(loads), len(stores)) == (8, 8) and max(loads) < min(stores)
