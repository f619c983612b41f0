"""Blocks of layers with a sliding window, kept only as far as a later token attends.

A sequence reaches the window blocks that its next token attends to and those that a step writes.
Blocks that no sequence reaches are cached while the prefix cache knows them; the least recently
reached is evicted first.

Each sequence with blocks has a reserve (promise) of as many as its window may need, and a step has
room besides: so no step lacks window blocks.  With one window block per block, nothing is reserved.
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
    """The window blocks, each named by its block of the pool."""

    def __init__(
        self,
        blocks: WindowBlocks,
        sizes: Sequence[int],
        *,
        num_blocks: int,
        block_size: int,
        step_tokens: int,
    ) -> None:
        """Start empty.

        Args:
            sizes: The window sizes of the layers, ascending.
            num_blocks: Blocks of the pool.
            step_tokens: The most tokens of a step.

        Raises:
            ValueError: There are too few for one sequence.
        """
        self.blocks = blocks
        self.num_used = 0  # reached by sequences; a shared one counts once
        self._smallest, self._largest = sizes[0], sizes[-1]
        self._most = blocks_of_window(self._largest, block_size)  # promised to a sequence
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
        """Return the first token that `next_token` attends to."""
        return max(0, next_token - self._largest + 1)

    def whole_from(self, next_token: int) -> int:
        """Return from which token on all layers have KV after a transfer: the smallest window."""
        return max(0, next_token - self._smallest + 1)

    def may_promise(self, num_before: int, num_after: int, later: Iterable[int] = ()) -> bool:
        """Return whether a sequence may grow, with room for others of `later` blocks each."""
        more = self._promised(num_after) - self._promised(num_before)
        more += sum(map(self._promised, later))
        return self._limit is None or self._num_promised + more <= self._limit

    def promise(self, num_before: int, num_after: int) -> None:
        """Record that a sequence has grown or shrunk."""
        self._num_promised += self._promised(num_after) - self._promised(num_before)

    def _promised(self, num_blocks: int) -> int:
        return min(num_blocks, self._most)

    def reach(self, block: int) -> None:
        """Record that a sequence reaches a block, and keep the KV that it has."""
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
        """Record that a sequence no longer reaches a block; cache it if `is_known`."""
        self._reaching[block] -= 1
        assert self._reaching[block] >= 0, f"block {block} was left twice"
        if self._reaching[block] == 0:
            self.num_used -= 1
            self._cached[block] = None
            if not is_known:
                self._forget(block)

    def drop(self, block: int) -> None:
        """Forget a block that the prefix cache has lost."""
        if block in self._cached:
            self._forget(block)

    def is_there(self, block: int) -> bool:
        return block in self.blocks

    def _forget(self, block: int) -> None:
        del self._cached[block]
        self.blocks.forget(block)

    def check(self, reached: Iterable[Sequence[int]], held: Iterable[int]) -> None:
        """Assert free + used + cached == total, and that sequences explain every use and promise.

        Args:
            reached: The window blocks that each sequence reaches.
            held: How many blocks each sequence has.
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
    """Return the windows over a cache; None if every block has room for window KV."""
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
    """Return a sequence's block table for the layers of a group."""
    of_group = cache.layout.groups[group]
    if isinstance(of_group, KVGroup) and of_group.window is not None:
        return cache.window_blocks.table(block_table)
    return block_table


def unpack(
    cache: KVCache, block_table: Sequence[int], rectangle: Rectangle, kv: Buffer, num_tokens: int
) -> None:
    """Store one received rectangle of the KV of `num_tokens` tokens.

    The first token of a window may lie inside a block.  Kernels also read the slots before it,
    although no query attends to them, and a NaN there would spoil their sums: so they are zeroed.

    Raises:
        ValueError: The KV does not fill the rectangle.
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
