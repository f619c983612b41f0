"""Launch sampling.cu: one thread block for each row, on tensors of the device."""

from __future__ import annotations

import torch

from kernels.cuda import launch
from kernels.cuda.launch import Launch, struct

DRAW = struct("logits settings allowed drawn", "size stride num_words")
# Threads of a block: at least one for each value of a digit; more for longer rows.
MIN_THREADS, MAX_THREADS, TOKENS_OF_A_THREAD = 256, 1024, 32
# Size of `Shared` in sampling.cu: two halves of the sums of 256 digits in 32 columns, the sums of
# 32 warps, and the result of `find`.
SHARED_BYTES = 2 * 256 * 32 * 4 + 32 * 8 + 16


def draw(
    logits: torch.Tensor,
    settings: torch.Tensor | None,
    allowed: torch.Tensor | None,
    drawn: torch.Tensor,
) -> list[Launch]:
    """Return the launch that writes a token for each row to `drawn`, [R] int64.

    `kernels.draw` explains the other arguments.
    """
    num_rows, size = logits.shape
    if not num_rows:
        return []
    logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    arguments = DRAW(size=size, stride=logits.stride(0))
    keep = {"logits": logits, "drawn": drawn}
    if settings is not None:
        keep["settings"] = settings
    if allowed is not None:
        keep["allowed"], arguments.num_words = allowed, allowed.shape[1]
    launch.point(arguments, **keep)
    wanted = -(-size // TOKENS_OF_A_THREAD // 32) * 32
    threads = min(MAX_THREADS, max(MIN_THREADS, wanted))
    grid, tensors = (num_rows, 1), tuple(keep.values())
    return [Launch("sampling", "draw", grid, threads, SHARED_BYTES, arguments, tensors)]
