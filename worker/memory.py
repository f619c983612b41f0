"""Calculates how many KV blocks fit in memory after the weights are loaded."""

from __future__ import annotations

import sys

from wire.process.memory import free_memory
from worker.config import Config
from worker.executor.contract import MemoryRequirements

# Bounds of the default KV cache in host memory.  Its pages are committed when blocks are used.
MIN_HOST_BYTES, MAX_HOST_BYTES = 256 << 20, 4 << 30
# Beyond so many blocks, which only tiny models reach, routers do not track what a worker caches.
MAX_DEFAULT_BLOCKS = 1 << 18
# For the CUDA context, libraries, kernels, CUDA graphs and copy buffers: a guess, not measured.
GPU_OVERHEAD_BYTES = 1 << 30


def default_kv_cache_bytes(
    memory: MemoryRequirements, config: Config, free_bytes: int | None
) -> int:
    """Return the default size of the KV cache in bytes.

    On GPUs this is --memory-share of their memory, less the loaded weights and the activations of
    the largest step.  All GPUs of the worker are assumed to have the same free memory as this one.
    On a CPU it is an eighth of `free_bytes` (None if unknown), within the bounds above.

    Raises:
        ValueError: Less than one block is left; the message names the settings to change.
    """
    if not _is_on_gpu(config.device):
        most = memory.cache_bytes(MAX_DEFAULT_BLOCKS, config.block_size, config.step_tokens)
        eighth = min((free_bytes or 0) // 8, MAX_HOST_BYTES, most)
        return max(MIN_HOST_BYTES, eighth)
    cuda = sys.modules["torch"].cuda
    free, total = cuda.mem_get_info()
    used = cuda.memory_reserved() + GPU_OVERHEAD_BYTES
    share = int(config.memory_share * total)
    activation_bytes = memory.activation_bytes_per_token * config.step_tokens
    left: int = min(free, share - used) * config.num_processes - activation_bytes
    needed = memory.cache_bytes(1, config.block_size, config.step_tokens)
    if left >= needed:
        return left
    raise ValueError(
        f"--memory-share is {config.memory_share}, {share} bytes of the GPU's {total}: {used} are "
        f"taken and {free} free, and steps of {config.step_tokens} tokens take {activation_bytes}, "
        f"which leaves {max(0, left)} for KV, and a block takes {needed}; raise it, lower "
        "--max-ubatch-tokens, or take a smaller model"
    )


def count_blocks(memory: MemoryRequirements, config: Config, free_bytes: int | None) -> int:
    """Return --num-blocks, or if it is 0 the number of blocks that fit in --kv-cache-bytes.

    Raises:
        ValueError: There would be no block, or blocks and activations exceed `free_bytes`.
    """
    num_blocks, kv_cache_bytes = config.num_blocks, config.kv_cache_bytes
    if not (num_blocks or kv_cache_bytes):
        kv_cache_bytes = default_kv_cache_bytes(memory, config, free_bytes)
    sizes = config.block_size, config.step_tokens
    blocks = num_blocks or memory.blocks_in(kv_cache_bytes, *sizes)
    states = memory.num_states(blocks, config.block_size)
    windowed = memory.num_window_blocks(blocks, *sizes)
    extra = f" with {states} states" if states else ""
    extra += f" and {windowed} for layers with a window" if windowed else ""
    if blocks < 1:
        raise ValueError(
            f"--kv-cache-bytes is {kv_cache_bytes}, and a block of {config.block_size} "
            f"tokens{extra} takes {memory.cache_bytes(1, *sizes)}; raise it or lower --block-size"
        )
    activation_bytes = memory.activation_bytes_per_token * config.step_tokens
    cache_bytes = memory.cache_bytes(blocks, *sizes)
    if free_bytes is None or activation_bytes + cache_bytes <= free_bytes:
        return blocks
    setting, value = (
        ("--num-blocks", num_blocks) if num_blocks else ("--kv-cache-bytes", kv_cache_bytes)
    )
    most = max(0, free_bytes - activation_bytes)
    if num_blocks:
        most = memory.blocks_in(most, *sizes)
    raise ValueError(
        f"{setting} is {value}: {blocks} blocks{extra} take {cache_bytes} bytes and steps of "
        f"{config.step_tokens} tokens {activation_bytes}, but beside the model's "
        f"{memory.parameter_bytes} only {free_bytes} are free; lower {setting} "
        f"to {most} at most, or --max-ubatch-tokens, or take a smaller model"
    )


def check_host_bytes(
    memory: MemoryRequirements, config: Config, num_blocks: int, free_bytes: int | None
) -> None:
    """Check that --host-kv-bytes are free, besides the KV cache and a step on a CPU.

    Raises:
        ValueError: It is not; the message names the settings to change.
    """
    wanted = config.host_kv_bytes
    if wanted and not _is_on_gpu(config.device):
        wanted += memory.activation_bytes_per_token * config.step_tokens
        wanted += memory.cache_bytes(num_blocks, config.block_size, config.step_tokens)
    if free_bytes is not None and wanted > free_bytes:
        raise ValueError(
            f"--host-kv-bytes is {config.host_kv_bytes}; with what the KV cache and a step take of "
            f"host memory, {wanted} bytes are needed and {free_bytes} are free; lower it or, on a "
            "CPU, --kv-cache-bytes"
        )


def free_bytes(device: str, num_devices: int = 1) -> int | None:
    """Return the free memory in bytes of the host or `num_devices` equal GPUs; None if unknown."""
    if _is_on_gpu(device):
        free: int = sys.modules["torch"].cuda.mem_get_info()[0]
        return free * num_devices
    return free_memory()


def _is_on_gpu(device: str) -> bool:
    """Return whether the model was loaded into GPU memory, without importing torch."""
    torch = sys.modules.get("torch")
    return device != "cpu" and torch is not None and bool(torch.cuda.memory_allocated())
