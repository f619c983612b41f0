"""What windows reach: blocks of layers with a window, kept only as far as a later token sees.

A sequence reaches the blocks that its next token sees in those layers and the ones that a step
writes; as it goes on, it leaves those behind.  What nobody reaches any more but the prefix cache
still knows is cached, for others may go on from there; the least recently reached goes first.

Each sequence that holds blocks is promised as many as a window may need, and the tokens of a step
have room besides: so whoever holds blocks always gets what it reaches, and a step is never cut
short for it.  Where every block can have one beside it, nothing need be promised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from wire.layout import KVGroup
from worker.compute.contract import KVCache
from worker.compute.window_blocks import WindowBlocks
from worker.executor.contract import blocks_of_window


class Windows:
    """The blocks of layers with a window, each named by the block of the pool it lies beside."""

    def __init__(
        self,
        blocks: WindowBlocks,
        sizes: Sequence[int],
        *,
        num_blocks: int,
        block_size: int,
        step_tokens: int,
    ) -> None:
        """Begin with none reached.

        Args:
            sizes: How many positions layers see, the smallest first.
            num_blocks: Of the pool they lie beside.
            step_tokens: The most that a step computes.

        Raises:
            ValueError: There are too few for one sequence.
        """
        self.blocks = blocks
        self.num_used = 0  # that sequences reach; a shared one counts once
        self._smallest, self._largest = sizes[0], sizes[-1]
        self._most = blocks_of_window(self._largest, block_size)  # that one is promised
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
        """Return the first token that the one at `next_token` looks at."""
        return max(0, next_token - self._largest + 1)

    def whole_from(self, next_token: int) -> int:
        """Return from which token on all layers have KV, when only what is seen has come.

        The smallest window begins last: before that its layers lack what others have.
        """
        return max(0, next_token - self._smallest + 1)

    def may_promise(self, num_before: int, num_after: int, later: Iterable[int] = ()) -> bool:
        """Whether a sequence of so many blocks may have so many, and others as many as `later`."""
        more = self._promised(num_after) - self._promised(num_before)
        more += sum(map(self._promised, later))
        return self._limit is None or self._num_promised + more <= self._limit

    def promise(self, num_before: int, num_after: int) -> None:
        """A sequence of so many blocks has so many from now on."""
        self._num_promised += self._promised(num_after) - self._promised(num_before)

    def _promised(self, num_blocks: int) -> int:
        return min(num_blocks, self._most)

    def reach(self, block: int) -> None:
        """A sequence reaches a block; what it finds there stays."""
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
        """A sequence reaches a block no more; it stays while the prefix cache knows the block."""
        self._reaching[block] -= 1
        assert self._reaching[block] >= 0, f"block {block} was left twice"
        if self._reaching[block] == 0:
            self.num_used -= 1
            self._cached[block] = None
            if not is_known:
                self._forget(block)

    def drop(self, block: int) -> None:
        """Nobody can find a block any more."""
        if block in self._cached:
            self._forget(block)

    def is_there(self, block: int) -> bool:
        """Whether layers with a window have KV of this block."""
        return block in self.blocks

    def _forget(self, block: int) -> None:
        del self._cached[block]
        self.blocks.forget(block)

    def check(self, reached: Iterable[Sequence[int]], held: Iterable[int]) -> None:
        """Assert free + used + cached == total, and that sequences explain every use and promise.

        Args:
            reached: Which blocks each sequence reaches.
            held: How many each has in all.
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
    """Return the windows over an executor's cache; None if none need be watched."""
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
    """Return where a sequence's KV lies in layers of a group, for `pack` and `unpack`."""
    of_group = cache.layout.groups[group]
    if isinstance(of_group, KVGroup) and of_group.window is not None:
        return cache.window_blocks.table(block_table)
    return block_table
