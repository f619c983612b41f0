"""A segment on its way into blocks: who settles what becomes of it, and what goes wrong with it."""

from __future__ import annotations

import gc
import weakref

from tests.kv import whole
from wire.errors import ErrorCode, WireError
from wire.frames import KvCache
from wire.parts import Buffer
from wire.payloads import Offer
from wire.transfer import (
    MAX_SEGMENT_BYTES,
    KVReceiver,
    Segment,
    SegmentDescriptor,
    pack_places,
    segment_digest,
)
from worker.compute.contract import Memory
from worker.executor.hash import LAYOUT, HashKVCache
from worker.transfer.incoming import IncomingTransfer, store

NUM_TOKENS = 16
TOTAL = NUM_TOKENS * LAYOUT.token_bytes


def accepted(memory: Memory | None = None) -> IncomingTransfer:
    offer = Offer(
        layout=LAYOUT,
        num_tokens=NUM_TOKENS,
        total_bytes=TOTAL,
        token_ids=bytes(4 * NUM_TOKENS),
        memory=None if memory is None else "baton-1",
    )
    receiver = KVReceiver(
        *(1, offer),
        layout=LAYOUT,
        max_bytes=TOTAL,
        credit_bytes=TOTAL,
        lease_s=30.0,
        now=0.0,
    )
    receiver.accept(0, 0.0, 0 if memory is None else len(memory))
    transfer = IncomingTransfer(b"prefill-0-1", receiver)
    transfer.block_table, transfer.memory = (2,), memory
    return transfer


def segment_of(transfer: IncomingTransfer, kv: Buffer) -> Segment:
    descriptor = SegmentDescriptor.of(whole(LAYOUT, 0, NUM_TOKENS), TOTAL, segment_digest(1, kv))
    segment = transfer.receiver.on_segment(KvCache(1, 1, 1), (descriptor.pack(), kv), 0.0)
    assert segment is not None
    return segment


def test_what_is_wrong_with_it_is_returned_and_nothing_is_written() -> None:
    cache, transfer = HashKVCache(4, 16), accepted()
    segment = segment_of(transfer, bytes(TOTAL))
    before = bytes(cache.pack((2,), segment.rectangle))
    problem = store(cache, transfer, segment._replace(kv=b"\1" * TOTAL))
    assert isinstance(problem, WireError) and problem.code == ErrorCode.TRANSFER_FAILED
    assert bytes(cache.pack((2,), segment.rectangle)) == before


def test_what_is_wrong_keeps_no_memory_of_the_peer_mapped() -> None:
    cache, lent = HashKVCache(4, 16), HashKVCache(4, 16).memory
    assert lent is not None
    memory = cache.map_memory(lent.descriptor, b"")
    transfer, mapped = accepted(memory), weakref.ref(memory)
    descriptor = SegmentDescriptor.of(whole(LAYOUT, 0, NUM_TOKENS), TOTAL, 1, in_memory=1)
    parts = descriptor.pack(), pack_places([0])
    segment = transfer.receiver.on_segment(KvCache(1, 1, 1), parts, 0.0)
    assert segment is not None
    gc.collect()
    gc.disable()  # what waits for it, an idle worker may keep for as long as it runs
    try:
        problem = store(cache, transfer, segment)
        assert isinstance(problem, WireError)
        transfer.receiver.broken(segment, problem)
        del memory, transfer, segment, problem
        assert mapped() is None
    finally:
        gc.enable()


def test_of_a_transfer_that_is_over_nothing_is_written() -> None:
    cache, transfer = HashKVCache(4, 16), accepted()
    segment = segment_of(transfer, b"\1" * TOTAL)
    before = bytes(cache.pack((2,), segment.rectangle))
    transfer.receiver.cancel()
    assert store(cache, transfer, segment) is None
    assert bytes(cache.pack((2,), segment.rectangle)) == before


def test_an_ack_is_due_before_the_sender_lacks_credit() -> None:
    transfer = accepted()
    transfer.receiver.total_bytes = transfer.receiver.credit_bytes = 4 * MAX_SEGMENT_BYTES
    transfer.receiver.kv_bytes = MAX_SEGMENT_BYTES - 1
    assert not transfer.is_ack_due
    transfer.receiver.kv_bytes += 1
    assert transfer.is_ack_due
    transfer.acked_bytes = 1
    assert not transfer.is_ack_due
    transfer.receiver.credit_bytes = (
        MAX_SEGMENT_BYTES + 1
    )  # what is left of it lets no large one come
    assert transfer.is_ack_due
