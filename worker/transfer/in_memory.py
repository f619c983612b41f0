"""Segments in memory that both workers see: where they lie, and the one copy of them.  SPEC 6.8.

A block is kept as it is sent.  So of whole blocks nothing is packed: the sender only reads them,
for their digest, and the receiver copies them out of the sender's memory straight into blocks of
its own.  Its digest is of that copy, in a torch cache taken in the same pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wire.transfer import KVReceiver, Rectangle, Segment, running_digest
from worker.compute.contract import KVCache
from worker.compute.shared_memory import Bytes
from worker.engine.unpacking import unpack
from worker.engine.windows import table_of


def find(
    cache: KVCache, block_table: Sequence[int], rectangle: Rectangle, request_id: int
) -> tuple[tuple[int, ...], int] | None:
    """Return where in the cache's memory the blocks of a rectangle lie, and their digest.

    None where it has to be sent.
    """
    blocks = _blocks(cache, block_table, rectangle)
    if not blocks:
        return None
    digest = running_digest(request_id)
    for block in blocks:
        digest.update(block)
    assert cache.memory is not None
    start = cache.memory.bytes.ctypes.data
    places = tuple(np.frombuffer(block, np.uint8).ctypes.data - start for block in blocks)
    return places, digest.intdigest()


def fetch(
    cache: KVCache,
    block_table: Sequence[int],
    receiver: KVReceiver,
    segment: Segment,
    memory: Bytes,
) -> None:
    """Copy a segment out of the sender's memory into blocks.

    Raises:
        TransferFailed: What was copied is not what was sent.
    """
    rectangle, pieces = segment.rectangle, segment.pieces(memory.data)
    copies = _blocks(cache, block_table, rectangle)
    is_direct = len(copies) == len(pieces)
    if not is_direct:  # our blocks are cut otherwise, or lie elsewhere
        copies = [memoryview(bytearray(len(piece))) for piece in pieces]
    pairs = [
        (np.frombuffer(piece, np.uint8), np.frombuffer(copy, np.uint8))
        for piece, copy in zip(pieces, copies, strict=True)
    ]
    receiver.verify(segment, _copy(cache, pairs, receiver.request_id))
    if not is_direct:
        for tokens, copy in zip(rectangle.pieces(len(pieces)), copies, strict=True):
            unpack(cache, block_table, tokens, copy, receiver.num_tokens)


def _copy(cache: KVCache, pairs: Sequence[tuple[Bytes, Bytes]], request_id: int) -> int:
    """Copy each piece to where it belongs; return the digest of the copies."""
    if (found := cache.copy_digested(pairs, request_id)) is not None:
        return found
    digest = running_digest(request_id)
    for source, target in pairs:
        target[:] = source
        digest.update(target.data)
    return digest.intdigest()


def _blocks(cache: KVCache, block_table: Sequence[int], rectangle: Rectangle) -> list[memoryview]:
    """Return the bytes of a rectangle where they lie in memory, if that is whole blocks."""
    number, rest = divmod(len(rectangle.tokens), cache.block_size)
    if rest or not number or cache.memory is None:
        return []
    table = table_of(cache, rectangle.group, block_table)
    views = (cache.view(table, piece) for piece in rectangle.pieces(number))
    blocks = [view for view in views if view is not None]
    return blocks if len(blocks) == number else []
