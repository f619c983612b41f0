"""The number of KV blocks of a worker, and whether they fit beside the model.

This is asked when the weights are loaded: what is free then is for the activations of the largest
step and for the blocks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from worker.executor.contract import MemoryRequirements

# KV on a host by default; other programs need its memory, too.
HOST_KV_CACHE_BYTES = 256 << 20
# Set aside on a GPU for what is no tensor of torch's: the CUDA context, libraries, loaded kernels,
# and for recorded steps and buffers of copies.  Chosen, not measured.
BESIDE_TENSORS_BYTES = 1 << 30


def default_kv_cache_bytes(
    memory: MemoryRequirements,
    device: str,
    *,
    memory_share: float,
    block_size: int,
    max_ubatch_tokens: int,
    num_devices: int = 1,
) -> int:
    """Return the bytes of the KV cache where no setting says it.

    On a GPU that is this worker's share of its memory less the loaded weights and the largest
    step; elsewhere `HOST_KV_CACHE_BYTES`.

    Args:
        num_devices: How many GPUs the worker computes on; each has as much free as ours.

    Raises:
        ValueError: Less than a block is left; the message says what to change.
    """
    if not _is_on_gpu(device):
        return HOST_KV_CACHE_BYTES
    cuda = sys.modules["torch"].cuda
    free, total = cuda.mem_get_info()
    own = cuda.memory_reserved() + BESIDE_TENSORS_BYTES
    share = int(memory_share * total)
    activation_bytes = memory.activation_bytes_per_token * max_ubatch_tokens
    left: int = min(free, share - own) * num_devices - activation_bytes
    needed = memory.cache_bytes(1, block_size, max_ubatch_tokens)
    if left >= needed:
        return left
    raise ValueError(
        f"--memory-share is {memory_share}, {share} bytes of the GPU's {total}: {own} are taken "
        f"and {free} free, and steps of {max_ubatch_tokens} tokens take {activation_bytes}, which "
        f"leaves {max(0, left)} for KV, and a block takes {needed}; raise it, lower "
        "--max-ubatch-tokens, or take a smaller model"
    )


def count_blocks(
    memory: MemoryRequirements,
    *,
    num_blocks: int,
    kv_cache_bytes: int,
    block_size: int,
    max_ubatch_tokens: int,
    free_bytes: int | None,
) -> int:
    """Return how many blocks there will be: `num_blocks`, or what `kv_cache_bytes` pay for.

    Args:
        free_bytes: Memory for activations and blocks; None if nobody knows.

    Raises:
        ValueError: There would be no block, or more than fit; the message says what to change.
    """
    blocks = num_blocks or memory.blocks_in(kv_cache_bytes, block_size, max_ubatch_tokens)
    states = memory.num_states(blocks, block_size)
    windowed = memory.num_window_blocks(blocks, block_size, max_ubatch_tokens)
    beside = f" with {states} states" if states else ""
    beside += f" and {windowed} for layers with a window" if windowed else ""
    if blocks < 1:
        raise ValueError(
            f"--kv-cache-bytes is {kv_cache_bytes}, and a block of {block_size} tokens{beside} "
            f"takes {memory.cache_bytes(1, block_size, max_ubatch_tokens)}; raise it or lower "
            "--block-size"
        )
    activation_bytes = memory.activation_bytes_per_token * max_ubatch_tokens
    cache_bytes = memory.cache_bytes(blocks, block_size, max_ubatch_tokens)
    if free_bytes is None or activation_bytes + cache_bytes <= free_bytes:
        return blocks
    setting, value = (
        ("--num-blocks", num_blocks) if num_blocks else ("--kv-cache-bytes", kv_cache_bytes)
    )
    most = max(0, free_bytes - activation_bytes)
    if num_blocks:
        most = memory.blocks_in(most, block_size, max_ubatch_tokens)
    raise ValueError(
        f"{setting} is {value}: {blocks} blocks{beside} take {cache_bytes} bytes and steps of "
        f"{max_ubatch_tokens} tokens {activation_bytes}, but beside the model's "
        f"{memory.parameter_bytes} only {free_bytes} are free; lower {setting} "
        f"to {most} at most, or --max-ubatch-tokens, or take a smaller model"
    )


def free_bytes(
    device: str,
    meminfo: Path = Path("/proc/meminfo"),
    control_group: Path = Path("/sys/fs/cgroup"),
    *,
    num_devices: int = 1,
) -> int | None:
    """Return the memory that is free where an executor on `device` computes; None if unknown.

    Args:
        num_devices: How many GPUs it computes on, if it does; each has as much free as ours.
    """
    if _is_on_gpu(device):
        free: int = sys.modules["torch"].cuda.mem_get_info()[0]
        return free * num_devices
    limits = _free_in_machine(meminfo), _free_in_container(control_group)
    return min((free for free in limits if free is not None), default=None)


def _is_on_gpu(device: str) -> bool:
    """Whether the model was loaded into the memory of a GPU."""
    # A process that has not imported torch by now computes without it.
    torch = sys.modules.get("torch")
    # If "auto" found a usable GPU, the model lies in its memory.
    return device != "cpu" and torch is not None and bool(torch.cuda.memory_allocated())


def _free_in_machine(meminfo: Path) -> int | None:
    """Return what could be had without swapping; None where the system does not say."""
    if not meminfo.exists():
        return None
    return 1024 * _figures(meminfo.read_text().replace(":", ""))["MemAvailable"]


def _free_in_container(control_group: Path) -> int | None:
    """Return what is left of the limit of our control group, if it has one."""
    limit, usage, stat = (control_group / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.exists() or not limit.read_text().strip().isdecimal():  # "max" is no limit
        return None
    # Pages of files count as used, but are given up when memory is needed.
    figures = _figures(stat.read_text())
    used = int(usage.read_text()) - figures["active_file"] - figures["inactive_file"]
    return max(0, int(limit.read_text()) - used)


def _figures(text: str) -> dict[str, int]:
    """Read lines of a name and a number."""
    return {words[0]: int(words[1]) for words in map(str.split, text.splitlines())}
