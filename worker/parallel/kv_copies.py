"""Copies KV in and out of a cache whose parts are stored by the processes of one model.

The leader copies its own part itself (`OwnPart`).  It asks for copies of another process's part
(`RemotePart`), and a thread of that process makes them (`serve_copies`) beside the steps.  A copy
waits only until that process has computed the steps that the leader had when it asked.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import torch

from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.kv_cache import TorchKVCache, tensor_over
from worker.compute.ranks import Ranks
from worker.parallel.partition import Part

HEADER: Final = 10


class _Verb(IntEnum):
    PACK = 1
    UNPACK = 2
    END = 3


class Steps:
    """Counts the steps that this process has computed, or started on its GPU."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def add(self) -> None:
        """Count one more step; copies that are requested later see its KV."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count)

    @property
    def count(self) -> int:
        return self._count


def pack(cache: TorchKVCache, indexes: Sequence[int], local: Rectangle) -> memoryview:
    """Copy a rectangle out of cache blocks, or a recurrent state out of its slot."""
    if cache.is_state(local):
        return cache.pack_state(indexes[0], local)
    return cache.pack(indexes, local)


def unpack(cache: TorchKVCache, indexes: Sequence[int], local: Rectangle, segment: Buffer) -> None:
    """Copy received KV into cache blocks, or a recurrent state into its slot.

    Args:
        indexes: The blocks of the sequence, or the slot of the state.
        local: The rectangle in groups, layers and heads of this process's part.
    """
    if cache.is_state(local):
        cache.unpack_state(indexes[0], local, segment)
    else:
        cache.unpack(indexes, local, segment)


class OwnPart:
    """Copies KV of this process's own part."""

    def __init__(self, cache: TorchKVCache, part: Part) -> None:
        self._cache, self._part = cache, part

    def pack(self, indexes: Sequence[int], share: Rectangle) -> memoryview:
        return pack(self._cache, indexes, self._part.own(share))

    def unpack(self, indexes: Sequence[int], share: Rectangle, segment: Buffer) -> None:
        unpack(self._cache, indexes, self._part.own(share), segment)


class RemotePart:
    """Copies KV of another process's part, on the leader.  Thread-safe."""

    def __init__(self, ranks: Ranks, part: Part, steps: Steps) -> None:
        self._ranks, self._part, self._steps = ranks, part, steps
        self._lock = threading.Lock()

    def pack(self, indexes: Sequence[int], share: Rectangle) -> memoryview:
        local = self._part.own(share)
        segment = torch.empty(local.num_bytes(self._part.layout), dtype=torch.uint8)
        with self._lock:
            self._order(_Verb.PACK, indexes, local)
            self._ranks.receive_from(segment, self._part.process)
        return segment.numpy().data

    def unpack(self, indexes: Sequence[int], share: Rectangle, segment: Buffer) -> None:
        """Send a share to the other process and wait until it acknowledges the copy."""
        local = self._part.own(share)
        with self._lock:
            self._order(_Verb.UNPACK, indexes, local)
            self._ranks.send_to(tensor_over(segment), self._part.process)
            self._ranks.receive_from(torch.empty(1, dtype=torch.uint8), self._part.process)

    def end(self) -> None:
        """End the copy thread of the other process."""
        with self._lock:
            self._order(_Verb.END, (), Rectangle(0, range(0), range(0), range(0)))

    def _order(self, verb: _Verb, indexes: Sequence[int], local: Rectangle) -> None:
        group, layers, heads, tokens = local
        ends = [layers.start, layers.stop, heads.start, heads.stop, tokens.start, tokens.stop]
        numbers = [verb, self._steps.count, group, *ends, len(indexes)]
        self._ranks.send_to(torch.tensor(numbers), self._part.process)
        if indexes:
            self._ranks.send_to(torch.tensor(indexes), self._part.process)


def serve_copies(ranks: Ranks, cache: TorchKVCache, steps: Steps) -> None:
    """Serve the leader's requests to pack and unpack KV, until `_Verb.END`."""
    header = torch.empty(HEADER, dtype=torch.int64)
    while True:
        ranks.receive_from(header, 0)
        verb, num_steps, group, *ends, num_indexes = header.tolist()
        if verb == _Verb.END:
            return
        indexes = torch.empty(num_indexes, dtype=torch.int64)
        ranks.receive_from(indexes, 0)
        local = Rectangle(group, range(*ends[:2]), range(*ends[2:4]), range(*ends[4:]))
        # This process may still be computing a step that the leader has finished.
        steps.wait_for(num_steps)
        if verb == _Verb.PACK:
            ranks.send_to(tensor_over(pack(cache, indexes.tolist(), local)), 0)
        else:
            segment = torch.empty(local.num_bytes(cache.layout), dtype=torch.uint8)
            ranks.receive_from(segment, 0)
            unpack(cache, indexes.tolist(), local, segment.numpy().data)
            ranks.send_to(torch.zeros(1, dtype=torch.uint8), 0)
