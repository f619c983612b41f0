"""KV of preempted sequences in host memory, and the choice between swapping and recomputing.

A preempted sequence is swapped to host memory if its KV fits and copy_s < recompute_s, where

    copy_s      = 2 * bytes / copy rate         out now, in later
    recompute_s = tokens / prefill rate

Both rates are measured, as decaying sums of bytes or tokens over seconds, so short measurements
weigh little.  The prefill rate is measured in large steps that mostly prefill, as a recompute does.

When the sequence resumes, blocks that are still in the prefix cache are shared, not copied in.

The scheduler plans the copies.  The engine makes them before it computes a step: first those to
the host, then those from it, so that no block is overwritten before it is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from wire.layout import KVGroup
from wire.transfer import Rectangle, plan
from worker.compute.contract import KVCache
from worker.engine.sequence import Sequence
from worker.engine.windows import unpack

# Initial estimates, a slow copy and a fast model, so that swapping starts only if it pays off.
COPY_BYTES_PER_S: Final = 1e9
PREFILL_TOKENS_PER_S: Final = 10_000.0
# A segment size for which `plan` makes one segment for each group of layers.
_WHOLE: Final = 1 << 62
# A measurement that took this many seconds weighs as much as all earlier ones together.
_MEMORY_S: Final = 0.5


@dataclass(slots=True)
class Costs:
    """The measured rates at which this machine copies KV and prefills prompts."""

    copy_bytes_per_s: float = COPY_BYTES_PER_S
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S

    def observe_copy(self, num_bytes: int, elapsed_s: float) -> None:
        self.copy_bytes_per_s = _updated(self.copy_bytes_per_s, num_bytes, elapsed_s)

    def observe_prefill(self, num_tokens: int, elapsed_s: float) -> None:
        self.prefill_tokens_per_s = _updated(self.prefill_tokens_per_s, num_tokens, elapsed_s)

    def prefers_swap(self, num_bytes: int, num_tokens: int) -> bool:
        """Return whether copying KV out and back in is faster than recomputing it."""
        return 2 * num_bytes / self.copy_bytes_per_s < num_tokens / self.prefill_tokens_per_s


def _updated(rate: float, amount: int, elapsed_s: float) -> float:
    """Return the rate after one more measurement."""
    if elapsed_s <= 0:  # the clock did not move
        return rate
    return (rate * _MEMORY_S + amount) / (_MEMORY_S + elapsed_s)


class Swap(NamedTuple):
    """One copy of the KV of [token_start, token_start + num_tokens) out of or into `blocks`.

    For a copy out, `windowed` is the block table of sliding-window layers at the time of the plan.
    """

    sequence: Sequence
    blocks: tuple[int, ...]
    token_start: int
    num_tokens: int
    windowed: tuple[int, ...] = ()


@dataclass(slots=True)
class _Saved:
    num_tokens: int
    # The KV of each group of layers; empty until it is copied out.
    parts: list[tuple[Rectangle, memoryview]]


class SwapSpace:
    """Host memory for the KV of preempted sequences, at most `max_bytes`."""

    def __init__(
        self, cache: KVCache, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_bytes < 0:
            raise ValueError(f"swap_bytes is {max_bytes}, not 0 or more")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.costs = Costs()
        self._cache = cache
        self._layout = cache.layout
        self._clock = clock
        self._saved: dict[int, _Saved] = {}

    def __len__(self) -> int:
        return len(self._saved)

    def accepts(self, num_tokens: int) -> bool:
        """Return whether KV of `num_tokens` tokens fits and copying beats recomputing it."""
        num_bytes = self._layout.transfer_bytes(num_tokens)
        is_room = 0 < num_bytes <= self.max_bytes - self.num_bytes
        return is_room and self.costs.prefers_swap(num_bytes, num_tokens)

    def hold(self, request_id: int, num_tokens: int) -> None:
        """Reserve memory for KV that will be copied out."""
        assert request_id not in self._saved
        self._saved[request_id] = _Saved(num_tokens, [])
        self.num_bytes += self._layout.transfer_bytes(num_tokens)

    def out(self, sequence: Sequence, num_tokens: int) -> Swap:
        """Plan the copy of a sequence's KV out of its blocks, and reserve memory for it."""
        self.hold(sequence.request_id, num_tokens)
        blocks = tuple(sequence.block_table)
        windowed = self._cache.window_blocks.table(blocks) if self._layout.windows else ()
        return Swap(sequence, blocks, 0, num_tokens, tuple(windowed))

    def num_tokens(self, request_id: int) -> int:
        """Return how many tokens of the sequence have their KV in host memory."""
        saved = self._saved.get(request_id)
        return 0 if saved is None else saved.num_tokens

    def drop(self, request_id: int) -> None:
        """Free the host memory of the sequence's KV, if any."""
        saved = self._saved.pop(request_id, None)
        if saved is not None:
            self.num_bytes -= self._layout.transfer_bytes(saved.num_tokens)

    def carry_out(self, swaps: Iterable[Swap]) -> None:
        """Copy KV from blocks to host memory, before anything else writes to the blocks."""
        for swap in swaps:
            saved = self._saved.get(swap.sequence.request_id)
            if saved is None:  # dropped after the plan
                continue
            start_s = self._clock()
            for part in plan(self._layout, 0, saved.num_tokens, _WHOLE):
                group = self._layout.groups[part.group]
                is_windowed = isinstance(group, KVGroup) and group.window is not None
                kv = self._cache.pack(swap.windowed if is_windowed else swap.blocks, part)
                saved.parts.append((part, kv))
            num_bytes = sum(len(kv) for _, kv in saved.parts)
            self.costs.observe_copy(num_bytes, self._clock() - start_s)

    def carry_in(self, swaps: Iterable[Swap]) -> None:
        """Copy KV from host memory into blocks, and free that memory."""
        for swap in swaps:
            saved = self._saved[swap.sequence.request_id]
            assert saved.parts, "only what was copied out is copied in"
            start_s, num_bytes = self._clock(), 0
            for part, kv in saved.parts:
                group = self._layout.groups[part.group]
                wanted, wanted_kv = part, kv
                if isinstance(group, KVGroup) and swap.token_start > part.tokens.start:
                    wanted = part._replace(tokens=range(swap.token_start, part.tokens.stop))
                    wanted_kv = _tail(kv, group, part, swap.token_start - part.tokens.start)
                unpack(self._cache, swap.blocks, wanted, wanted_kv, saved.num_tokens)
                num_bytes += len(wanted_kv)
            self.costs.observe_copy(num_bytes, self._clock() - start_s)
            self.drop(swap.sequence.request_id)

    def check(self, waiting: Iterable[int]) -> None:
        """Assert that all KV belongs to waiting sequences, and that its size is counted right."""
        assert self._saved.keys() <= set(waiting), "KV of a sequence that does not wait"
        sizes = (self._layout.transfer_bytes(it.num_tokens) for it in self._saved.values())
        assert self.num_bytes == sum(sizes) <= self.max_bytes


def _tail(kv: memoryview, group: KVGroup, part: Rectangle, num_skipped: int) -> memoryview:
    """Return the KV of a part without its first `num_skipped` tokens."""
    size = group.head_bytes // (group.key_dim + group.value_dim)
    layers = np.frombuffer(kv, np.uint8).reshape(len(part.layers), -1)
    keys_end = len(part.heads) * len(part.tokens) * group.key_dim * size
    sides = [
        side.reshape(len(part.layers), len(part.heads), len(part.tokens), dim * size)
        for side, dim in (
            (layers[:, :keys_end], group.key_dim),
            (layers[:, keys_end:], group.value_dim),
        )
    ]
    tails = [side[:, :, num_skipped:].reshape(len(part.layers), -1) for side in sides]
    return np.concatenate(tails, axis=1).data.cast("B")
