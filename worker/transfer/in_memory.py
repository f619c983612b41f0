"""Segments in memory that both workers map: their addresses, and the one copy of them.  SPEC 6.8.

A block is kept as it is sent.  So of whole blocks nothing is packed: the sender only reads them,
for their digest, and the receiver copies them out of the sender's memory straight into blocks of
its own.  The receiver's digest is of that copy, and is taken in the same pass where possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wire.errors import RemoteProtocolError
from wire.transfer import KVReceiver, Rectangle, Segment
from worker.compute.contract import KVCache, Memory
from worker.engine.unpacking import unpack
from worker.engine.windows import table_of


def find(
    cache: KVCache, block_table: Sequence[int], rectangle: Rectangle, request_id: int
) -> tuple[tuple[int, ...], int] | None:
    """Return where in the cache's memory the blocks of a rectangle lie, and their digest.

    None where it has to be sent.
    """
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
        TransferFailed: What was copied is not what was sent.
        RemoteProtocolError: There can be no piece of that size at one of the places.
    """
    rectangle, places = segment.rectangle, segment.places
    size, request_id = segment.descriptor.num_bytes // len(places), receiver.request_id
    target: Any = cache.memory
    targets: Sequence[int] = _places(cache, block_table, rectangle)
    is_packed = target is None or target.kind != memory.kind or len(targets) != len(places)
    if is_packed:  # our blocks are cut otherwise, or lie elsewhere
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
    """Return where in the cache's memory the blocks of a rectangle lie, if it is whole blocks."""
    number, rest = divmod(len(rectangle.tokens), cache.block_size)
    if rest or not number or cache.memory is None:
        return ()
    table = table_of(cache, rectangle.group, block_table)
    found = (cache.place(table, piece) for piece in rectangle.pieces(number))
    places = tuple(place for place in found if place is not None)
    return places if len(places) == number else ()
