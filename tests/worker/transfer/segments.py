"""The ends of a connection for segments, as tests play them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from wire.frames import KvCache
from wire.parts import Buffer
from wire.transfer import GREETING, TOKEN_BYTES, Rectangle, SegmentDescriptor, segment_head
from worker.transfer.segment_hub import SegmentHub

PEER, WAIT_S = b"prefill-0-1", 30
DESCRIPTOR = SegmentDescriptor.of(Rectangle(0, range(1), range(1), range(1)), 5, 0)
Arrived = tuple[int, list[bytes], Buffer]


class Taking:
    """A `SegmentHandler` that stores nothing and tells what has come."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[int, bytes, Exception | None]] = asyncio.Queue()
        self.lasts: list[int] = []  # segments behind which nothing more had come

    def admit(self, peer: bytes, frame: KvCache, descriptor: Buffer, kv: Buffer) -> Arrived | None:
        assert peer == PEER
        return frame.segment, [], kv

    def store(self, arrival: Arrived) -> Exception | None:
        arrival[1].append(bytes(arrival[2]))
        return None

    def stored(self, arrival: Arrived, problem: Exception | None, *, is_last: bool) -> None:
        number, kv, _ = arrival
        if is_last:
            self.lasts.append(number)
        self.heard.put_nowait((number, b"".join(kv), problem))

    async def next(self) -> tuple[int, bytes, Exception | None]:
        return await asyncio.wait_for(self.heard.get(), WAIT_S)


@asynccontextmanager
async def hub_of(taking: Taking, host: str = "127.0.0.1") -> AsyncIterator[SegmentHub[Any]]:
    hub = SegmentHub(host, 0, taking)
    try:
        yield hub
    finally:
        await hub.close()


def segment(number: int, kv: bytes) -> bytes:
    """The messages of a segment."""
    return segment_head(KvCache(1, number, 9), DESCRIPTOR, len(kv)) + kv


async def greet(listening: socket.socket) -> socket.socket:
    """Accept a connection for segments, whatever its token."""
    loop = asyncio.get_running_loop()
    client, _ = await loop.sock_accept(listening)
    greeting = await loop.sock_recv(client, len(GREETING) + TOKEN_BYTES)
    await loop.sock_sendall(client, greeting[: len(GREETING)])
    return client
