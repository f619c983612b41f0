"""Sockets of the KV plane carry what SPEC allows, and share one context."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from wire.errors import ErrorCode, WireError
from wire.parts import Buffer
from wire.transfer import MAX_SEGMENT_BYTES
from worker.transfer.sockets import MAP_BYTES, KVPlane


async def test_a_peer_that_reads_nothing_costs_a_decode_worker_little() -> None:
    plane = KVPlane(max_model_len=1000)
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    hub = plane.hub(lambda peer, _: heard.put_nowait(peer), lambda _: None)
    # It never comes to read: its socket is not polled.
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.connect(hub.bind("tcp://127.0.0.1:0"))
    deaf.send_multipart([b"1234", b"says something"])
    peer = await asyncio.wait_for(heard.get(), 30)
    part = bytes(1 << 16)
    with pytest.raises(WireError) as caught:
        for _ in range(4096):
            hub.send(peer, [part])
    assert caught.value.code is ErrorCode.OVERLOADED
    assert hub.queued_bytes(peer) <= 2 * (MAX_SEGMENT_BYTES + MAP_BYTES)
    deaf.close(0)
    context.term()
    await hub.close()
    await plane.close()


async def test_the_longest_offer_crosses() -> None:
    plane = KVPlane(max_model_len=2_000_000)
    received: asyncio.Queue[list[Buffer]] = asyncio.Queue()
    hub = plane.hub(lambda _, parts: received.put_nowait(parts), lambda _: None)
    endpoint = hub.bind("tcp://127.0.0.1:0")
    link = plane.link(b"prefill-0-1", endpoint, lambda _: None, lambda: None)
    link.send([b"1234", bytes(8_000_000 + MAP_BYTES)])
    parts = await asyncio.wait_for(received.get(), 30)
    assert isinstance(parts[1], memoryview) and len(parts[1]) == 8_000_000 + MAP_BYTES
    parts.clear()
    await link.close()
    await hub.close()
    await plane.close()
