"""Sockets of the KV plane carry what SPEC allows, and share one context."""

from __future__ import annotations

import asyncio

from wire.parts import Buffer
from worker.transfer.sockets import MAP_BYTES, KVPlane


async def test_the_longest_offer_crosses() -> None:
    plane = KVPlane(max_model_len=2_000_000)
    received: asyncio.Queue[list[Buffer]] = asyncio.Queue()
    hub = plane.hub(lambda _, parts: received.put_nowait(parts), lambda _: None)
    endpoint = hub.bind("tcp://127.0.0.1:0")
    link = plane.link(b"prefill-0-1", endpoint, lambda _: None, lambda: None)
    link.send([b"1234", bytes(8_000_000 + MAP_BYTES)])
    parts = await asyncio.wait_for(received.get(), 10)
    assert isinstance(parts[1], memoryview) and len(parts[1]) == 8_000_000 + MAP_BYTES
    parts.clear()
    await link.close()
    await hub.close()
    await plane.close()
