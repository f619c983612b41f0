"""Window blocks: the KV of sliding-window layers, kept only while a later token may attend to it.

A sequence reaches the window blocks that its next token attends to and those that a step writes.
Window blocks that no sequence reaches are cached while their block is in the prefix cache; the
least recently reached is evicted first.

As many window blocks as its window may need are promised (reserved) to each sequence with blocks,
and some are kept for the tokens of a step, so no step runs out of window blocks.  If every block
has its own window block, nothing needs to be reserved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from wire.layout import KVGroup
from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.contract import KVCache
from worker.compute.window_blocks import WindowBlocks
from worker.executor.contract import blocks_of_window


class Windows:
    """The window blocks of a pool, each identified by the block that it belongs to."""

    def __init__(
        self,
        blocks: WindowBlocks,
        sizes: Sequence[int],
        *,
        num_blocks: int,
        block_size: int,
        step_tokens: int,
    ) -> None:
        """Start with no window block in use.

        Args:
            sizes: The window sizes of the layers, ascending.
            num_blocks: The number of blocks in the pool.
            step_tokens: The most tokens of a step.

        Raises:
            ValueError: There are too few window blocks for one sequence.
        """
        self.blocks = blocks
        self.num_used = 0  # window blocks reached by sequences; a shared one counts once
        self._smallest, self._largest = sizes[0], sizes[-1]
        self._most = blocks_of_window(self._largest, block_size)  # the most for one sequence
        self._num_promised = 0
        self._limit: int | None = None
        if blocks.num_blocks < num_blocks:
            self._limit = blocks.num_blocks - step_tokens // block_size
            if self._limit < self._most:
                least = self._most + step_tokens // block_size
                raise ValueError(
                    f"room for {blocks.num_blocks} blocks of layers with a window, a window of "
                    f"{self._largest} and steps of {step_tokens} tokens need {least}"
                )
        self._reaching = [0] * num_blocks
        self._cached: dict[int, None] = {}  # the least recently reached first

    @property
    def num_free(self) -> int:
        return self.blocks.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def first_seen(self, next_token: int) -> int:
        """Return the first position to which the token at `next_token` attends in any window."""
        return max(0, next_token - self._largest + 1)

    def whole_from(self, next_token: int) -> int:
        """Return the position from which on all layers have KV after a transfer.

        Layers with the smallest window receive the fewest tokens.
        """
        return max(0, next_token - self._smallest + 1)

    def may_promise(self, num_before: int, num_after: int, later: Iterable[int] = ()) -> bool:
        """Return whether enough window blocks are unreserved for a sequence to grow.

        `later` are the numbers of blocks of other sequences that must still fit afterwards.
        """
        more = self._promised(num_after) - self._promised(num_before)
        more += sum(map(self._promised, later))
        return self._limit is None or self._num_promised + more <= self._limit

    def promise(self, num_before: int, num_after: int) -> None:
        """Reserve window blocks for a sequence that had `num_before` blocks and has `num_after`."""
        self._num_promised += self._promised(num_after) - self._promised(num_before)

    def _promised(self, num_blocks: int) -> int:
        return min(num_blocks, self._most)

    def reach(self, block: int) -> None:
        """Record that a sequence reaches a block; allocate a window block if it has none."""
        self._reaching[block] += 1
        if self._reaching[block] > 1:
            return
        self.num_used += 1
        if block in self.blocks:
            del self._cached[block]
            return
        if not self.blocks.num_free:
            self._forget(next(iter(self._cached)))
        self.blocks.take(block)

    def leave(self, block: int, *, is_known: bool) -> None:
        """Record that a sequence no longer reaches a block.

        If no other sequence does, cache its window block if the prefix cache has the block
        (`is_known`), else free it.
        """
        self._reaching[block] -= 1
        assert self._reaching[block] >= 0, f"block {block} was left twice"
        if self._reaching[block] == 0:
            self.num_used -= 1
            self._cached[block] = None
            if not is_known:
                self._forget(block)

    def drop(self, block: int) -> None:
        """Free the cached window block of a block that is no longer in the prefix cache."""
        if block in self._cached:
            self._forget(block)

    def is_there(self, block: int) -> bool:
        return block in self.blocks

    def _forget(self, block: int) -> None:
        del self._cached[block]
        self.blocks.forget(block)

    def check(self, reached: Iterable[Sequence[int]], held: Iterable[int]) -> None:
        """Assert free + used + cached == total, and that uses and reservations add up.

        Args:
            reached: For each sequence, the blocks that it reaches.
            held: For each sequence, its number of blocks.
        """
        free, used, cached = self.num_free, self.num_used, self.num_cached
        total = self.blocks.num_blocks
        assert free + used + cached == total, (
            f"in windows {free} free + {used} used + {cached} cached != {total}"
        )
        reaching = Counter[int]()
        for blocks in reached:
            reaching.update(blocks)
        assert len(reaching) == used, f"{used} blocks are used, {len(reaching)} are reached"
        for block, count in reaching.items():
            assert count == self._reaching[block], f"block {block}: {count} reach it"
        promised = sum(map(self._promised, held))
        assert promised == self._num_promised, f"{self._num_promised} promised, not {promised}"
        assert self._limit is None or promised <= self._limit, f"{promised} are too many promises"


def windows_of(cache: KVCache, step_tokens: int) -> Windows | None:
    """Return the windows of a cache; None if every block has its own memory for window KV."""
    if not cache.layout.windows or cache.window_blocks.is_fixed:
        return None
    return Windows(
        cache.window_blocks,
        cache.layout.windows,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        step_tokens=step_tokens,
    )


def table_of(cache: KVCache, group: int, block_table: Sequence[int]) -> Sequence[int]:
    """Return the block table of a sequence for the layers of a group."""
    of_group = cache.layout.groups[group]
    if isinstance(of_group, KVGroup) and of_group.window is not None:
        return cache.window_blocks.table(block_table)
    return block_table


def unpack(
    cache: KVCache, block_table: Sequence[int], rectangle: Rectangle, kv: Buffer, num_tokens: int
) -> None:
    """Store one received rectangle of a sequence whose first `num_tokens` tokens are transferred.

    The first token of a window may lie inside a block.  Kernels also read the slots before it,
    although no query attends to them, and a NaN there would spoil their sums, so they are zeroed.

    Raises:
        ValueError: The size of the KV is not that of the rectangle.
    """
    block_table = table_of(cache, rectangle.group, block_table)
    cache.unpack(block_table, rectangle, kv)
    group, first = cache.layout.groups[rectangle.group], rectangle.tokens.start
    if not isinstance(group, KVGroup) or first != group.sent(0, num_tokens).start:
        return
    before = range(first // cache.block_size * cache.block_size, first)
    if before:
        gap = rectangle._replace(tokens=before)
        cache.unpack(block_table, gap, bytes(gap.num_bytes(cache.layout)))
