"""Windows over a pool of blocks, for tests without a cache."""

from collections.abc import Sequence

from worker.compute.window_blocks import WindowBlocks
from worker.engine.windows import Windows


def windows_over(
    num_blocks: int,
    block_size: int,
    sizes: Sequence[int],
    num_window_blocks: int | None = None,
    step_tokens: int = 0,
) -> Windows:
    """Return windows of these sizes, by default with a block for each of the pool."""
    number = num_blocks if num_window_blocks is None else num_window_blocks
    blocks = WindowBlocks(num_blocks, block_size, number)
    return Windows(
        blocks, sizes, num_blocks=num_blocks, block_size=block_size, step_tokens=step_tokens
    )
