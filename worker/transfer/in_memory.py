"""Transfer of segments through the sender's memory, which the receiver maps.  SPEC 6.8.

A block in memory has the same layout as on the wire, so whole blocks need no packing: the sender
only computes their digest, and the receiver copies them from the sender's memory into its own
blocks.  The receiver verifies the digest of its copy, computed while copying where possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wire.errors import RemoteProtocolError
from wire.transfer import KVReceiver, Rectangle, Segment
from worker.compute.contract import KVCache, Memory
from worker.engine.windows import table_of, unpack


def find(
    cache: KVCache, block_table: Sequence[int], rectangle: Rectangle, request_id: int
) -> tuple[tuple[int, ...], int] | None:
    """Return the offsets and the digest of a rectangle that is whole blocks in `cache.memory`.

    Return None for any other rectangle: its bytes must be sent.
    """
    offsets = _offsets(cache, block_table, rectangle)
    if cache.memory is None or not offsets:
        return None
    size = rectangle.num_bytes(cache.layout) // len(offsets)
    return offsets, cache.memory.digest(offsets, size, request_id)


def fetch(
    cache: KVCache,
    block_table: Sequence[int],
    receiver: KVReceiver,
    segment: Segment,
    memory: Memory,
) -> None:
    """Copy a segment from the sender's memory into the receiver's blocks.

    Raises:
        TransferFailed: The digest of the copy is wrong.
        RemoteProtocolError: A block is not inside the sender's memory.
    """
    rectangle, offsets = segment.rectangle, segment.places
    size, request_id = segment.descriptor.num_bytes // len(offsets), receiver.request_id
    target: Any = cache.memory
    targets: Sequence[int] = _offsets(cache, block_table, rectangle)
    is_staged = target is None or target.kind != memory.kind or len(targets) != len(offsets)
    if is_staged:  # no direct copy: the receiver's blocks differ in size or kind of memory
        targets = range(0, size * len(offsets), size)
        target = memory.room(size * len(offsets))
    try:
        digest = memory.copy(offsets, size, target, targets, request_id)
    except ValueError as error:
        raise RemoteProtocolError(f"KV_CACHE: segment {segment.number}: {error}") from error
    receiver.verify(segment, digest)
    if is_staged:
        for part, start in zip(rectangle.pieces(len(offsets)), targets, strict=True):
            kv = target.bytes[start : start + size].data
            unpack(cache, block_table, part, kv, receiver.num_tokens)


def _offsets(cache: KVCache, block_table: Sequence[int], rectangle: Rectangle) -> tuple[int, ...]:
    """Return the offsets in `cache.memory` of a rectangle's blocks; () if it isn't whole blocks."""
    num_blocks, rest = divmod(len(rectangle.tokens), cache.block_size)
    if rest or not num_blocks or cache.memory is None:
        return ()
    table = table_of(cache, rectangle.group, block_table)
    found = (cache.place(table, part) for part in rectangle.pieces(num_blocks))
    offsets = tuple(offset for offset in found if offset is not None)
    return offsets if len(offsets) == num_blocks else ()
