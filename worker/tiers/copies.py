"""Copies of whole blocks between a KV cache and host memory, and how fast they are."""

from __future__ import annotations

from wire.parts import Buffer
from wire.transfer import plan
from worker.compute.contract import KVCache

# A segment size for which `plan` makes one rectangle for each group of layers.
_WHOLE = 1 << 62
# A measurement that took this many seconds weighs as much as all earlier ones together.
_MEMORY_S = 0.5
# An amount that was not moved, because it would take too long, makes the rate count as so much
# better: it is tried again some time.
_HOPE = 1.05


class BlockCopies:
    """Reads and writes whole blocks of a cache without windows and states.  Thread-safe."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._parts = plan(cache.layout, 0, cache.block_size, _WHOLE)
        self._sizes = [part.num_bytes(cache.layout) for part in self._parts]
        self.num_bytes = sum(self._sizes)

    def copy_out(self, block: int) -> Buffer:
        """Return a copy of a block's KV, in wire order."""
        parts = [self._cache.pack((block,), part) for part in self._parts]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def copy_in(self, block: int, kv: Buffer) -> None:
        start, whole = 0, memoryview(kv)
        for part, size in zip(self._parts, self._sizes, strict=True):
            self._cache.unpack((block,), part, whole[start : start + size])
            start += size


class Rate:
    """A measured rate, in bytes a second."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            kept = _MEMORY_S / (_MEMORY_S + seconds)
            self._bytes = kept * self._bytes + num_bytes
            self._seconds = kept * self._seconds + seconds

    def seconds(self, num_bytes: int) -> float:
        """Return how long so many bytes take; 0 before the first measurement."""
        return num_bytes * self._seconds / self._bytes if self._bytes else 0.0

    def doubt(self) -> None:
        """Take the rate for a little better than it was measured."""
        self._seconds /= _HOPE
