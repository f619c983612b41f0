"""Segments in memory that both workers map.  SPEC 6.8.

A block has the layout of the wire, so whole blocks need no packing: the sender only computes their
digest, and the receiver copies them from the sender's memory into its own blocks.  The receiver's
digest is of that copy, taken in the same pass where possible.
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
    """Return the offsets of a rectangle's blocks in memory, and their digest; None: send it."""
    places = _places(cache, block_table, rectangle)
    if cache.memory is None or not places:
        return None
    size = rectangle.num_bytes(cache.layout) // len(places)
    return places, cache.memory.digest(places, size, request_id)


def fetch(
    cache: KVCache,
    block_table: Sequence[int],
    receiver: KVReceiver,
    segment: Segment,
    memory: Memory,
) -> None:
    """Copy a segment out of the sender's memory into blocks.

    Raises:
        TransferFailed: The digest of the copy is wrong.
        RemoteProtocolError: A block does not lie within the memory.
    """
    rectangle, places = segment.rectangle, segment.places
    size, request_id = segment.descriptor.num_bytes // len(places), receiver.request_id
    target: Any = cache.memory
    targets: Sequence[int] = _places(cache, block_table, rectangle)
    is_packed = target is None or target.kind != memory.kind or len(targets) != len(places)
    if is_packed:  # our blocks have another size, or lie elsewhere
        targets = range(0, size * len(places), size)
        target = memory.room(size * len(places))
    try:
        digest = memory.copy(places, size, target, targets, request_id)
    except ValueError as error:
        raise RemoteProtocolError(f"KV_CACHE: segment {segment.number}: {error}") from error
    receiver.verify(segment, digest)
    if is_packed:
        for tokens, start in zip(rectangle.pieces(len(places)), targets, strict=True):
            piece = target.bytes[start : start + size].data
            unpack(cache, block_table, tokens, piece, receiver.num_tokens)


def _places(cache: KVCache, block_table: Sequence[int], rectangle: Rectangle) -> tuple[int, ...]:
    """Return the offsets of a rectangle's blocks in the cache's memory, if it is whole blocks."""
    number, rest = divmod(len(rectangle.tokens), cache.block_size)
    if rest or not number or cache.memory is None:
        return ()
    table = table_of(cache, rectangle.group, block_table)
    found = (cache.place(table, piece) for piece in rectangle.pieces(number))
    places = tuple(place for place in found if place is not None)
    return places if len(places) == number else ()
