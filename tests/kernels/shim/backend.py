"""The CUDA kernels as a backend on the CPU: the same .cu, compiled by g++ against cuda_cpu.h.

The host's side (`kernels.cuda.backend`) is the real thing; only the launch itself is replaced.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from kernels.cuda import backend as cuda
from kernels.cuda.backend import source_text
from kernels.cuda.launch import Launch
from kernels.cuda.prompt_attention import Way
from kernels.cuda.tiling import Gpu

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Shared by the runs of one checkout, and by the workers of one run.
BUILD = ROOT / ".pytest_cache" / "shim"
# What the host believes the device to have: shared memory as sm_89 or sm_90, and few
# multiprocessors, so that some keys are split and others are not.
GPU, LARGE_GPU = Gpu(24, 100 << 10), Gpu(8, 228 << 10)
HOPPER = LARGE_GPU._replace(is_wide=True)
# What a thread block must leave alone stands on both sides of a result.
MARGIN, UNTOUCHED = 64, 192.0


def cuda_headers() -> list[Path]:
    """Return the folders of cuda_bf16.h and nv/target: of the wheels, else of a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(at) / "cu13/include" for at in (spec and spec.submodule_search_locations) or ()]
    for place in (*wheels, Path("/usr/local/cuda/include")):
        folders = [place, place / "cccl"]
        needed = ("cuda_fp8.h", "crt/host_defines.h", "nv/target")
        if all(any((folder / name).exists() for folder in folders) for name in needed):
            return folders
    return []


def why_not() -> str | None:
    """Say what the shim lacks here, None if it can run."""
    if shutil.which("g++") is None:
        return "the shim needs g++"
    if not cuda_headers():
        return "the shim needs the CUDA headers: pip install 'baton-serve[dev]'"
    return None


def compile_kernels(source: str, kernels: Sequence[str], text: str | None = None) -> ctypes.CDLL:
    """Compile instantiations of one file of csrc/, or of `text` in its place."""
    text = text or source_text(source)
    struct = {
        "rotate_and_append": "Heads",
        "move": "Move",
        "copy_pieces": "Pieces",
        "rms_norm": "Norm",
        "gate": "Gate",
        "draw": "Draw",
    }
    entries = "".join(
        f'extern "C" void run{number}(unsigned x, unsigned y, int threads, size_t bytes, '
        f"int order, int seed, int late, const void* a) {{\n"
        f"  const auto& it = *(const {struct.get(name.partition('<')[0], 'Attention')}*)a;\n"
        f"  shim::launch([&] {{ {name}(it); }}, x, y, threads, bytes, order, seed, late);\n}}\n"
        for number, name in enumerate(kernels)
    )
    return ctypes.CDLL(str(library(source, f'#include "cuda_cpu.h"\n{text}\n{entries}')))


def library(name: str, program: str) -> Path:
    """Compile a program that begins with cuda_cpu.h, unless that has been done."""
    target = BUILD / f"{name}-{_digest(program)}.so"
    return _once(target, ["-shared", f"-I{_precompiled().parent}", "-x", "c++", "-"], program)


def _precompiled() -> Path:
    """Return cuda_cpu.h as g++ has parsed it: half of the time of a compilation."""
    header = HERE / "cuda_cpu.h"
    target = BUILD / _digest("") / f"{header.name}.gch"
    return _once(target, ["-x", "c++-header", str(header)], "")


@functools.cache
def _digest(program: str) -> str:
    headers = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
    return hashlib.sha256((program + headers).encode()).hexdigest()[:16]


def _once(target: Path, arguments: Sequence[str], program: str) -> Path:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling just this
            if not target.exists():
                _compile(target, arguments, program)
    return target


def _compile(target: Path, arguments: Sequence[str], program: str) -> None:
    made = target.with_suffix(".part")
    command = ["g++", "-O1", "-std=c++17", "-fPIC", "-w", *arguments, "-o", str(made)]
    command += [f"-I{place}" for place in (HERE, *cuda_headers())]
    done = subprocess.run(command, input=program, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    made.replace(target)


class Margins(TorchFunctionMode):
    """Puts margins around new tensors, which no kernel may write to; all is UNTOUCHED at first."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **kwargs or {})
        if func not in (torch.empty, torch.empty_like, torch.Tensor.new_empty):
            return made
        whole = torch.full((MARGIN + made.numel() + MARGIN,), UNTOUCHED, dtype=made.dtype)
        self._made.append(whole)
        return whole[MARGIN : MARGIN + made.numel()].view(made.shape)

    def check(self) -> None:
        for whole in self._made:
            for margin in (whole[:MARGIN], whole[-MARGIN:]):
                assert (margin.float() == UNTOUCHED).all(), "written beyond the result"


class Shim:
    """A backend; every launch runs its thread blocks in an order of its own.

    Args:
        kernels: of each source, the instantiations that may be asked for.
        order: 0 as numbered, 1 reversed, 2 at random; `late` delays asynchronous copies.
    """

    def __init__(
        self,
        kernels: Mapping[str, Sequence[str]],
        *,
        order: int = 2,
        late: bool = True,
        gpu: Gpu = GPU,
        texts: dict[str, str] | None = None,
    ) -> None:
        self._kernels = {source: list(names) for source, names in kernels.items()}
        self._libraries = {
            source: compile_kernels(source, names, (texts or {}).get(source))
            for source, names in self._kernels.items()
            if names
        }
        self._order, self._late, self._seed, self._gpu = order, late, 0, gpu

    def __getattr__(self, name: str) -> Any:
        """Return an operator of `kernels.cuda.backend` that starts its kernels here."""
        operator = partial(cuda.attend, Way.OURS) if name == "paged_attention" else vars(cuda)[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            host: dict[str, Any] = {"start": lambda _, launches: self.run(launches)}
            # So few thread blocks that each takes several rows.
            host |= {"gpu": lambda _: self._gpu, "GATE_BLOCKS_PER_MULTIPROCESSOR": 1}
            with patch.multiple(cuda, **host), Margins() as made:
                result = operator(*args, **kwargs)
            made.check()
            return result

        return call

    def run(self, launches: list[Launch]) -> None:
        for it in launches:
            self._seed += 1
            entry = self._libraries[it.source][f"run{self._kernels[it.source].index(it.kernel)}"]
            entry(
                *it.grid,
                it.threads,
                ctypes.c_size_t(it.shared_bytes),
                self._order,
                self._seed,
                int(self._late),
                ctypes.byref(it.arguments),
            )
