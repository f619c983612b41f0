"""The CUDA kernels as a backend on the CPU: the same .cu, compiled by g++ against cuda_cpu.h.

What the host decides (`kernels.cuda.launch`) is the real thing; only the launch itself is replaced.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from kernels import reference
from kernels.contract import Activation, PagedBatch
from kernels.cuda import launch, sampling
from kernels.cuda.backend import source_text
from kernels.cuda.launch import Launch
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


def between_margins(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a run with margins, the tensor of that shape in its midst); all is UNTOUCHED."""
    size = math.prod(shape)
    whole = torch.full((MARGIN + size + MARGIN,), UNTOUCHED, dtype=dtype)
    return whole, whole[MARGIN : MARGIN + size].view(*shape)


def checked(whole: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `out`, whose margins nothing may have written to."""
    for margin in (whole[:MARGIN], whole[-MARGIN:]):
        assert (margin.float() == UNTOUCHED).all(), "written beyond the result"
    return out


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

    check_pool = staticmethod(launch.check_pool)
    route, expert_mlp = staticmethod(reference.route), staticmethod(reference.expert_mlp)

    def rotate_and_append(
        self,
        heads: torch.Tensor,
        rotation: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: PagedBatch,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        num_tokens, num_rows, head_dim = heads.shape
        shape = (num_tokens, num_rows - 2 * pool.shape[3], head_dim)
        whole, query = between_margins(shape, heads.dtype)
        self.run(launch.rotate_and_append(heads, rotation, pool, layer, batch, query, norm, eps))
        return checked(whole, query)

    def paged_attention(
        self,
        query: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        whole, out = between_margins(query.shape, query.dtype)
        out.fill_(float("nan"))
        self.run(
            launch.attention(
                query,
                pool,
                layer,
                batch,
                out,
                scale=scale,
                window=window,
                cap=cap,
                sinks=sinks,
                gpu=self._gpu,
            )
        )
        return checked(whole, out)

    def pack_kv(
        self,
        pool: torch.Tensor,
        block_table: Sequence[int],
        layers: range,
        tokens: range,
        dtype: torch.dtype,
        heads: range,
    ) -> torch.Tensor:
        shape = (len(layers), 2, len(heads), len(tokens), pool.shape[5])
        whole, segment = between_margins(shape, dtype)
        self.run(launch.move(pool, block_table, layers, heads, tokens, segment, into_pool=False))
        return checked(whole, segment)

    def unpack_kv(
        self,
        pool: torch.Tensor,
        block_table: Sequence[int],
        layers: range,
        tokens: range,
        segment: torch.Tensor,
        heads: range,
    ) -> None:
        segment = segment.contiguous()
        self.run(launch.move(pool, block_table, layers, heads, tokens, segment, into_pool=True))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        whole, out = between_margins(x.shape, x.dtype)
        self.run(launch.norm(x, weight, eps, out))
        return checked(whole, out)

    def add_rms_norm(
        self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        whole, out = between_margins(x.shape, x.dtype)
        self.run(launch.norm(x, weight, eps, out, added))
        return checked(whole, out)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        whole, out = between_margins(shape, gate_up.dtype)
        self.run(launch.gate(gate_up, out, activation, wanted_blocks=24))
        return checked(whole, out)

    def draw(
        self,
        logits: torch.Tensor,
        settings: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        whole, drawn = between_margins((len(logits),), torch.int64)
        self.run(sampling.draw(logits, settings, allowed, drawn))
        return checked(whole, drawn)

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
