"""The operators on an NVIDIA GPU: csrc/*.cu compiled by NVRTC through CuPy.

CuPy compiles and loads a kernel when it is first needed, and its driver binding launches the kernel
on torch's current stream.  Only this module imports CuPy, and no sooner than needed, so the module
can be imported anywhere; `require_device` reports what is missing.  A pool that `launch.check_pool`
rejects is a KernelError.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from ctypes import addressof, c_void_p
from functools import cache, partial
from hashlib import sha256
from importlib import import_module, resources
from typing import Any

import torch

from kernels.cache import compiled_code, opened
from kernels.contract import Activation, KernelError, PagedBatch, Rectangle, Softmax, segment_shape
from kernels.cuda import launch, sampling
from kernels.cuda import prompt_attention as prompts
from kernels.cuda.launch import Launch
from kernels.cuda.launch import check_pool as check_pool
from kernels.cuda.prompt_attention import Way
from kernels.cuda.tiling import WIDE_HEAD_DIMS, Gpu
from kernels.reference import expert_mlp as expert_mlp
from kernels.reference import route as route

_LOG = logging.getLogger("kernels")
# mma.sync with bf16 and cp.async need Ampere.
MIN_CAPABILITY = (8, 0)
# wgmma needs Hopper: code that NVRTC compiles for sm_90a runs on no other architecture.
HOPPER = (9, 0)
OPTIONS = {"attention_hopper": ("-arch=sm_90a",)}
# How many blocks of `launch.MAX_GATE_THREADS` a multiprocessor of Ampere or Hopper can run.
GATE_BLOCKS_PER_MULTIPROCESSOR = 8
# A kernel with more dynamic shared memory needs an attribute, see `_function`.
DEFAULT_SHARED_BYTES = 48 << 10

_started: dict[int, str] = {}
# For each kind of model (`prompts.kind`), the fastest method by prompt length, as measured by
# `measure_prompts`.
_fastest: dict[tuple[object, ...], prompts.Table] = {}


def require_device(index: int = 0) -> None:
    """Raise KernelError, with advice, unless kernels can be compiled for and run on this GPU."""
    if not torch.cuda.is_available():
        built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise KernelError(
            f"no GPU: torch {torch.__version__} (built {built}) sees none; install a CUDA build of "
            "torch and a driver, or use --device cpu"
        )
    if index >= torch.cuda.device_count():
        raise KernelError(f"no GPU {index}: torch sees {torch.cuda.device_count()} of them")
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < MIN_CAPABILITY:
        raise KernelError(
            f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}, the "
            "kernels need 8.0 (Ampere) or newer; use --device cpu"
        )
    _cupy()


def rotate_and_append(
    heads: torch.Tensor,
    rotation: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    num_tokens, num_rows, head_dim = heads.shape
    query = heads.new_empty(num_tokens, num_rows - 2 * pool.shape[3], head_dim)
    start(
        pool.device, launch.rotate_and_append(heads, rotation, pool, layer, batch, query, norm, eps)
    )
    return query


def paged_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, batch: PagedBatch, softmax: Softmax
) -> torch.Tensor:
    """See `kernels.paged_attention`; prompts use the method that `measure_prompts` found fastest.

    If that is torch's, one of our kernels still computes layers with a window, a cap or sinks, and
    steps that are not made of whole prompts.
    """
    table, way = _fastest.get(prompts.kind(pool, query.shape[1])), Way.OURS
    if table:
        _, way = table[0]  # the faster one of our kernels
        is_plain = all(it is None for it in softmax[1:])
        if is_plain and prompts.choose(table, batch) is Way.FLASH:
            return prompts.flash(query, pool[:, layer], batch, softmax.scale)
    return attend(way, query, pool, layer, batch, softmax)


def attend(
    way: Way,
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    softmax: Softmax,
) -> torch.Tensor:
    """Compute `paged_attention` by our kernels; `way` is used for sequences of many rows."""
    query, device = query.contiguous(), gpu(pool.device.index or 0)
    out = torch.empty_like(query)
    device = device._replace(is_wide=True) if way is Way.WIDE else device
    start(pool.device, launch.attention(query, pool, layer, batch, softmax, out, device))
    return out


def measure_prompts(
    pool: torch.Tensor, num_heads: int, seconds: prompts.Seconds | None = None
) -> prompts.Table:
    """Time prompt attention by each method; from then on `paged_attention` uses the fastest.

    Args:
        seconds: Returns how long a method takes for a prompt of a given length; by default it runs
            the method on the pool's device.
    """
    seconds = seconds or partial(prompts.seconds, attend, pool, num_heads)
    table = prompts.measure(seconds, has_wide=_has_wide(pool, num_heads))
    _fastest[prompts.kind(pool, num_heads)] = table
    return table


def _has_wide(pool: torch.Tensor, num_heads: int) -> bool:
    """Return whether `attend_wide` may be used: verified, on Hopper, and equal to `attend` here."""
    dtype, head_dim = pool.dtype, pool.shape[5]
    # A kernel that faults would end the worker at startup.
    if not is_verified("attend_wide", "attention_hopper"):
        return False
    if dtype not in launch.TILED_DTYPES or head_dim not in WIDE_HEAD_DIMS:
        return False
    if torch.cuda.get_device_capability(pool.device.index or 0) != HOPPER:
        return False
    try:
        if prompts.agree(attend, pool, num_heads):
            return True
        error = "its results are not those of attend"
    except Exception as raised:  # CuPy's and the driver's are of many classes
        error = str(raised)
    _LOG.error("attend_wide is not used for %s heads of %s: %s", dtype, head_dim, error)
    return False


def is_verified(kernel: str, source: str) -> bool:
    """Return whether `scripts/gpu_check` found this version of a kernel to be right on a GPU."""
    text = (resources.files("kernels") / "verified.json").read_text()
    found = json.loads(text)["kernels"].get(kernel, {"passed": False})
    return bool(found["passed"] and found["hash"] == source_hash(source))


def pack_kv(
    pool: torch.Tensor, block_table: Sequence[int], rectangle: Rectangle, dtype: torch.dtype
) -> torch.Tensor:
    segment = torch.empty(segment_shape(pool, rectangle), dtype=dtype, device=pool.device)
    start(pool.device, launch.move(pool, block_table, rectangle, segment, into_pool=False))
    return segment


def unpack_kv(
    pool: torch.Tensor, block_table: Sequence[int], rectangle: Rectangle, segment: torch.Tensor
) -> None:
    segment = segment.to(pool.device).contiguous()
    start(pool.device, launch.move(pool, block_table, rectangle, segment, into_pool=True))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    start(x.device, launch.norm(x, weight, eps, out))
    return out


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    out = torch.empty_like(x)
    start(x.device, launch.norm(x, weight, eps, out, added.contiguous()))
    return out


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    of_device = gpu(gate_up.device.index or 0)
    blocks = of_device.multiprocessors * GATE_BLOCKS_PER_MULTIPROCESSOR
    start(gate_up.device, launch.gate(gate_up, out, activation, wanted_blocks=blocks))
    return out


def draw(
    logits: torch.Tensor, settings: torch.Tensor | None = None, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    start(logits.device, sampling.draw(logits, settings, allowed, drawn))
    return drawn


def start(place: torch.device, launches: list[Launch]) -> None:
    """Launch kernels on torch's current stream of a device."""
    device = place.index or 0
    driver = _cupy().cuda.driver
    # Read the stream each time, because a graph capture uses another one.  Read only its handle:
    # creating torch's stream object takes longer than the launch.
    stream = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001
    # Another device may be current on this thread; on a thread that is new to CUDA none is.
    context, before = _context(device), driver.ctxGetCurrent()
    if before != context:
        driver.ctxSetCurrent(context)
    try:
        for it in launches:
            note_started(device, it.kernel)
            function = _function(it.source, it.kernel, it.shared_bytes, device)
            # The driver takes a list of the arguments' addresses, and copies the arguments before
            # it returns.  A kernel has one argument, so a pointer to its address is the list.
            listed = c_void_p(addressof(it.arguments))
            sizes = (*it.grid, 1, it.threads, 1, 1, it.shared_bytes)
            driver.launchKernel(function.ptr, *sizes, stream, addressof(listed), 0)
    finally:
        if before != context:
            driver.ctxSetCurrent(before)
    # torch's allocator reuses memory in stream order, so the tensors may go out of scope now.


def note_started(device: int, name: str) -> None:
    """Record the last launch on a device, a kernel or a graph: CUDA reports errors late."""
    _started[device] = name


def last_started(device: int) -> str | None:
    """Return the last recorded launch on a device; None if there was none."""
    return _started.get(device)


@cache
def _cupy() -> Any:
    """Import CuPy, and make it cache compiled kernels where no other user can write to them."""
    if "CUPY_CACHE_DIR" not in os.environ:
        try:
            place = compiled_code().expanduser() / "cuda"
            with opened(place):
                os.environ["CUPY_CACHE_DIR"] = str(place)
        except (OSError, RuntimeError) as error:  # the latter: this user has no home
            _LOG.warning("CUDA kernels are kept where CuPy keeps them: %s", error)
    try:
        return import_module("cupy")
    except ImportError as error:
        raise KernelError(
            "cupy is not installed: pip install 'baton-serve[cuda]' (CUDA 13) or "
            "'baton-serve[cuda12]' (CUDA 12)"
        ) from error


@cache
def gpu(device: int) -> Gpu:
    """Return the number of multiprocessors of a device, and the shared memory of each."""
    it = torch.cuda.get_device_properties(device)
    return Gpu(int(it.multi_processor_count), int(it.shared_memory_per_multiprocessor))


@cache
def _context(device: int) -> int:
    """Return the driver's context of a device, which torch and CuPy share."""
    cuda = _cupy().cuda
    with cuda.Device(device):
        cuda.runtime.free(0)  # creates the context if necessary, and makes it current
        return int(cuda.driver.ctxGetCurrent())


@cache
def _function(source: str, kernel: str, shared_bytes: int, device: int) -> Any:
    """Compile and load one instantiation, once; `ptr` of the result is the driver's handle.

    CuPy caches the binary on disk under a hash of the source text.
    """
    module = _cupy().RawModule(
        code=source_text(source),
        options=("-std=c++17", *OPTIONS.get(source, ())),
        name_expressions=(kernel,),
    )
    with _cupy().cuda.Device(device):
        function = module.get_function(kernel)
        if shared_bytes > DEFAULT_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = shared_bytes
        return function.kernel


@cache
def source_text(source: str) -> str:
    """Return a kernel file with its headers inlined: CuPy's cache ignores included files."""
    folder = resources.files("kernels") / "csrc"

    def text(name: str) -> str:
        own = (folder / name).read_text().replace("#pragma once\n", "")
        return re.sub(r'#include "(.*)"\n', lambda found: text(found[1]), own)

    return text(f"{source}.cu")


def source_hash(source: str) -> str:
    """Return a short digest of everything that a file of csrc/ is compiled from."""
    return sha256(source_text(source).encode()).hexdigest()[:16]
