"""Traps of libzmq and asyncio that were measured before the first line, each as a regression test.

1. A multipart tracker covers only the last frame: a KV buffer could be overwritten while unsent.
2. ZMTP heartbeats cut healthy connections: a stalled reader, one long frame.
3. The high-water mark counts messages, so bytes need a bound of our own (`test_outbox`).
4. A rank that rejoins while its old connection is half-open is not heard under its old identity.
5. A full peer must not cost another peer a message, and an unknown one is an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from wire.aio.zmq import Hub, Link, Sending
from wire.errors import ErrorCode, PeerLost, WireError
from wire.parts import Buffer

KIB = 1024
MIB = 1024 * KIB


class Relay:
    """A TCP relay to `port` with a gate: while that is shut nothing passes, nothing is closed."""

    def __init__(self, port: int) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=64 * KIB)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_hub, from_hub = await asyncio.open_connection("127.0.0.1", self._port)
        for copy in (self._copy(reader, from_hub), self._copy(to_hub, writer)):
            self._tasks.add(asyncio.create_task(copy))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(64 * KIB):
                await self.gate.wait()
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


class Side:
    """The calls that a hub or a link made to its handlers."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[bytes, list[Buffer]]] = asyncio.Queue()
        self.up: asyncio.Queue[bool] = asyncio.Queue()
        self.num_downs = 0

    def on_message(self, peer: bytes, parts: list[Buffer]) -> None:
        self.messages.put_nowait((peer, parts))

    def on_parts(self, parts: list[Buffer]) -> None:
        self.messages.put_nowait((b"", parts))

    def on_up(self) -> None:
        self.up.put_nowait(True)

    def on_down(self) -> None:
        self.num_downs += 1


class Net:
    """A hub, and links to it directly or through relays; closes them all."""

    def __init__(self) -> None:
        self._closers: list[Callable[[], object]] = []

    def hub(self, side: Side, **options: int | bool) -> tuple[Hub, int]:
        hub = Hub(side.on_message, **options)  # type: ignore[arg-type]
        self._closers.append(hub.close)
        return hub, int(hub.bind("tcp://127.0.0.1:*").rpartition(":")[2])

    async def relay(self, port: int) -> tuple[Relay, str]:
        relay = Relay(port)
        self._closers.append(relay.close)
        return relay, await relay.start()

    async def link(self, identity: bytes, endpoint: str, side: Side, **options: int | bool) -> Link:
        link = Link(
            identity,
            endpoint,
            side.on_parts,
            on_up=side.on_up,
            on_down=side.on_down,
            **options,  # type: ignore[arg-type]
        )
        self._closers.append(link.close)
        await side.up.get()
        return link

    async def close(self) -> None:
        for close in reversed(self._closers):
            closing = close()
            assert asyncio.iscoroutine(closing)
            await closing


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    await net.close()


def sends_until_full(send: Callable[[int], Sending | None]) -> int:
    """Send until the queue refuses; return how many messages were accepted."""
    for i in range(100_000):
        try:
            send(i)
        except WireError as error:
            assert error.code is ErrorCode.OVERLOADED
            return i
    raise AssertionError("the queue has no bound")


async def test_1_a_tracked_message_is_not_done_while_any_frame_is_unsent(net: Net) -> None:
    at_hub, at_link = Side(), Side()
    _, port = net.hub(at_hub, zero_copy=True)
    relay, endpoint = await net.relay(port)
    link = await net.link(b"prefill-0-1", endpoint, at_link, zero_copy=True)
    relay.gate.clear()
    kv = [bytearray(bytes([i]) * (8 * MIB)) for i in range(4)]
    # A small frame comes last: its own tracker would be done at once.
    sendings = [link.send([b"tag", b"header", part, b"tail"], track=True) for part in kv]
    tracked = [sending for sending in sendings if sending is not None]
    assert len(tracked) == 4
    # The kernel and the relay hold a few MiB, never the last of 32.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await tracked[-1].wait()
    assert not tracked[-1].done
    relay.gate.set()
    for i, sending in enumerate(tracked):
        await sending.wait()
        kv[i][:] = b"\xff" * len(kv[i])
    for i in range(4):
        _, parts = await at_hub.messages.get()
        assert parts[2] == bytes([i]) * (8 * MIB)


async def test_2_a_stalled_reader_is_not_disconnected(net: Net) -> None:
    at_hub, at_link = Side(), Side()

    def stall(peer: bytes, parts: list[Buffer]) -> None:
        time.sleep(0.005)  # the loop is blocked, as by a step of a careless engine
        at_hub.on_message(peer, parts)

    at_stalled = Side()
    at_stalled.on_message = stall  # type: ignore[method-assign]
    _, port = net.hub(at_stalled, high_water_mark=4)
    link = await net.link(b"prefill-0-1", f"tcp://127.0.0.1:{port}", at_link, high_water_mark=4)
    for i in range(65):
        link.send([b"tag", b"%d" % i, bytes(64 * KIB)])
    for i in range(65):
        _, parts = await at_hub.messages.get()
        assert parts[1] == b"%d" % i
    assert at_link.num_downs == 0


async def test_4_a_rank_rejoins_while_its_old_connection_is_half_open(net: Net) -> None:
    at_hub, at_old, at_new = Side(), Side(), Side()
    hub, port = net.hub(at_hub)
    relay, endpoint = await net.relay(port)
    old = await net.link(b"decode-3-100", endpoint, at_old)
    old.send([b"hello"])
    assert await at_hub.messages.get() == (b"decode-3-100", [b"hello"])
    relay.gate.clear()
    new = await net.link(b"decode-3-200", f"tcp://127.0.0.1:{port}", at_new)
    new.send([b"hello"])
    assert await at_hub.messages.get() == (b"decode-3-200", [b"hello"])
    hub.forget(b"decode-3-100")
    hub.send(b"decode-3-200", [b"welcome"])
    assert await at_new.messages.get() == (b"", [b"welcome"])
    assert hub.peers == [b"decode-3-200"]


async def test_4_no_one_takes_over_the_identity_of_a_connected_peer(net: Net) -> None:
    at_hub, at_owner, at_thief = Side(), Side(), Side()
    hub, port = net.hub(at_hub)
    endpoint = f"tcp://127.0.0.1:{port}"
    owner = await net.link(b"decode-3-100", endpoint, at_owner)
    owner.send([b"owner"])
    await at_hub.messages.get()
    thief = await net.link(b"decode-3-100", endpoint, at_thief)
    thief.send([b"thief"])
    for _ in range(100):
        owner.send([b"owner"])
        assert await at_hub.messages.get() == (b"decode-3-100", [b"owner"])
        hub.send(b"decode-3-100", [b"reply"])
        assert await at_owner.messages.get() == (b"", [b"reply"])
    assert at_hub.messages.empty()
    assert at_thief.messages.empty()


async def test_5_a_full_peer_costs_no_other_peer_a_message(net: Net) -> None:
    at_hub, at_full, at_idle = Side(), Side(), Side()
    hub, port = net.hub(at_hub, high_water_mark=2, max_queue_bytes=MIB, max_message_bytes=256 * KIB)
    relay, endpoint = await net.relay(port)
    full = await net.link(b"decode-0-1", endpoint, at_full)
    idle = await net.link(b"decode-1-1", f"tcp://127.0.0.1:{port}", at_idle)
    for link in (full, idle):
        link.send([b"hello"])
        await at_hub.messages.get()
    relay.gate.clear()
    num_sent = sends_until_full(
        lambda i: hub.send(b"decode-0-1", [b"tag", b"%d" % i, bytes(256 * KIB)])
    )
    assert hub.queued_bytes(b"decode-0-1") <= MIB
    for i in range(500):
        hub.send(b"decode-1-1", [b"%d" % i])
        assert await at_idle.messages.get() == (b"", [b"%d" % i])
    assert at_full.messages.empty() or num_sent > at_full.messages.qsize()
    relay.gate.set()
    for i in range(num_sent):
        _, parts = await at_full.messages.get()
        assert parts[1] == b"%d" % i
    with pytest.raises(PeerLost):
        hub.send(b"decode-2-1", [b"hello"])
