"""Hub and Link over real sockets, and the traps of libzmq that were measured before the first line.

1. A multipart tracker covers only the last frame: a KV buffer could be overwritten while unsent.
2. ZMTP heartbeats cut healthy connections: a stalled reader, one long frame.
3. The high-water mark counts messages, so bytes need a bound of our own.
4. A peer could take over the identity of a connected one.
5. A full peer must not cost another peer a message, and an unknown one is an error.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest
import zmq

from wire.aio.zmq import Hub, Link
from wire.errors import ErrorCode, LocalProtocolError, PeerLost, WireError
from wire.frames import Cancel, DecodeToken, Tag
from wire.parts import Buffer, encode
from wire.process.frame_counters import Traffic

LOOPBACK = "tcp://127.0.0.1:*"
KIB = 1024


class Relay:
    """A TCP relay to `port` with a gate: while that is shut nothing passes, nothing is closed."""

    def __init__(self, port: int) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=64 * KIB)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

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


class Bus:
    """A hub and its links, each with the queues of what its handlers were told."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[bytes, list[Buffer]]] = asyncio.Queue()
        self.lost: asyncio.Queue[bytes] = asyncio.Queue()
        self.story: list[object] = []
        self.hub = self.new_hub()
        self.endpoint = self.hub.bind(LOOPBACK)
        self.links: list[Link] = []

    def new_hub(self, **options: object) -> Hub:
        return Hub(self.on_message, on_lost=self.on_lost, **options)  # type: ignore[arg-type]

    def on_message(self, peer: bytes, parts: list[Buffer]) -> None:
        self.story.append(parts)
        self.messages.put_nowait((peer, parts))

    def on_lost(self, peer: bytes) -> None:
        self.story.append(peer)
        self.lost.put_nowait(peer)

    async def link(
        self, identity: bytes, endpoint: str = "", **options: object
    ) -> tuple[Link, asyncio.Queue[object]]:
        """Connect, to the hub by default, and wait until it is up."""
        told: asyncio.Queue[object] = asyncio.Queue()
        link = Link(
            identity,
            endpoint or self.endpoint,
            told.put_nowait,
            on_up=lambda: told.put_nowait("up"),
            on_down=lambda: told.put_nowait("down"),
            **options,  # type: ignore[arg-type]
        )
        self.links.append(link)
        assert await told.get() == "up"
        return link, told

    async def replace_hub(self, hub: Hub) -> None:
        await self.hub.close()
        self.hub = hub
        self.hub.bind(self.endpoint)


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = Bus()
    yield bus
    for link in bus.links:
        await link.close()
    await bus.hub.close()


@pytest.fixture
async def relay(bus: Bus) -> AsyncIterator[Relay]:
    relay = Relay(int(bus.endpoint.rpartition(":")[2]))
    await relay.start()
    yield relay
    await relay.close()


async def test_messages_keep_their_parts_and_their_order(bus: Bus) -> None:
    link, told = await bus.link(b"decode-0-1")
    sent = [[b"tag%d" % i, b"header", b"", b"payload"] for i in range(3000)]
    for parts in sent:
        link.send(parts)
    for parts in sent:
        assert await bus.messages.get() == (b"decode-0-1", parts)
    for parts in sent:
        bus.hub.send(b"decode-0-1", parts)
    for parts in sent:
        assert await told.get() == parts


async def test_a_peer_is_known_by_its_first_message(bus: Bus) -> None:
    link, told = await bus.link(b"decode-0-1")
    with pytest.raises(PeerLost) as caught:
        bus.hub.send(b"decode-0-1", [b"tag", b"header"])
    assert caught.value.peer == "decode-0-1"
    assert bus.hub.peers == []
    link.send([b"hello", b"header"])
    await bus.messages.get()
    assert bus.hub.peers == [b"decode-0-1"]
    bus.hub.send(b"decode-0-1", [b"welcome", b"header"])
    assert await told.get() == [b"welcome", b"header"]


async def test_the_loss_of_a_peer_follows_its_last_message(bus: Bus) -> None:
    leaving, _ = await bus.link(b"prefill-0-1")
    staying, _ = await bus.link(b"prefill-1-1")
    staying.send([b"stay", b""])
    for _ in range(500):
        leaving.send([b"leave", b""])
    await leaving.close(linger_s=5.0)
    assert await bus.lost.get() == b"prefill-0-1"
    assert bus.story.index(b"prefill-0-1") == len(bus.story) - 1
    assert bus.story.count([b"leave", b""]) == 500
    assert bus.hub.peers == [b"prefill-1-1"]
    with pytest.raises(PeerLost):
        bus.hub.send(b"prefill-0-1", [b"tag", b"header"])


async def test_messages_of_on_up_precede_queued_ones(bus: Bus) -> None:
    await bus.hub.close()
    up = asyncio.Event()

    def greet() -> None:
        link.send([b"hello", b""])
        up.set()

    link = Link(b"decode-0-1", bus.endpoint, lambda parts: None, on_up=greet)
    bus.links.append(link)
    link.send([b"early", b""])
    assert link.queued_bytes > 0
    bus.hub = bus.new_hub()
    bus.hub.bind(bus.endpoint)
    await up.wait()
    assert (await bus.messages.get())[1] == [b"hello", b""]
    assert (await bus.messages.get())[1] == [b"early", b""]
    assert link.queued_bytes == 0


async def test_a_link_tells_when_it_is_down_and_up_again(bus: Bus) -> None:
    link, told = await bus.link(b"decode-0-1")
    assert link.is_up
    await bus.replace_hub(bus.new_hub())
    assert await told.get() == "down"
    assert await told.get() == "up"
    link.send([b"again", b""])
    assert await bus.messages.get() == (b"decode-0-1", [b"again", b""])


async def test_a_link_tries_again_where_connections_are_taken_and_closed() -> None:
    taken = asyncio.Semaphore(0)

    def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        taken.release()

    # As a proxy with nobody behind it: libzmq's own back-off would begin anew each time.
    proxy = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    up = asyncio.Event()
    link = Link(b"decode-0-1", endpoint, lambda parts: None, on_up=up.set)
    for _ in range(3):
        await taken.acquire()
    proxy.close()
    await proxy.wait_closed()
    hub = Hub(lambda peer, parts: None)
    hub.bind(endpoint)
    await up.wait()
    await link.close()
    await hub.close()


async def test_a_link_drops_its_queue_when_the_connection_ends() -> None:
    """It was for the peer that is gone."""
    with zmq.Context() as context:
        deaf = context.socket(zmq.ROUTER)
        deaf.setsockopt(zmq.RCVHWM, 1)
        port = deaf.bind_to_random_port("tcp://127.0.0.1")
        up, down = asyncio.Event(), asyncio.Event()
        link = Link(
            b"decode-0-1",
            f"tcp://127.0.0.1:{port}",
            lambda parts: None,
            on_up=up.set,
            on_down=down.set,
            high_water_mark=1,
        )
        await up.wait()
        while link.queued_bytes < 8 << 20:  # the kernel's buffers are full
            link.send([b"tag", bytes(1 << 20)])
            await asyncio.sleep(0)
        assert link.is_up and link.queued_bytes
        deaf.close(0)
        await down.wait()
        assert link.queued_bytes == 0
        await link.close()


async def test_each_frame_is_counted_at_both_ends(bus: Bus) -> None:
    theirs, ours = Traffic(), Traffic()
    await bus.replace_hub(bus.new_hub(traffic=ours))
    link, told = await bus.link(b"decode-0-1", traffic=theirs)
    link.send(encode([DecodeToken(1, 5), DecodeToken(2, 6)]))
    await bus.messages.get()
    bus.hub.send(b"decode-0-1", encode(Cancel(1, 0)))
    await told.get()
    with pytest.raises(PeerLost):
        bus.hub.send(b"nobody", encode(Cancel(1, 0)))
    assert theirs.sent == ours.received == {Tag.DECODE_TOKEN: 2}
    assert theirs.received == ours.sent == {Tag.CANCEL: 1}
    assert ours.dropped == {"worker_lost": 1} and not theirs.dropped


async def test_large_parts_cross_without_a_copy_when_asked(bus: Bus) -> None:
    await bus.replace_hub(bus.new_hub(zero_copy=True))
    link, told = await bus.link(b"prefill-0-1", zero_copy=True)
    large = bytearray(range(256)) * 4 * KIB
    sending = link.send([b"tag", b"header", memoryview(large), b"tail"], track=True)
    _, parts = await bus.messages.get()
    assert [type(part) for part in parts] == [bytes, bytes, memoryview, bytes]
    assert parts[2] == large
    assert sending is not None
    await sending.wait()
    assert sending.done and not sending.was_dropped
    bus.hub.send(b"prefill-0-1", [b"ack", bytes(large)])
    reply = await told.get()
    assert isinstance(reply, list) and reply[1] == large


async def test_a_buffer_sent_without_tracking_may_be_reused_at_once(bus: Bus) -> None:
    await bus.replace_hub(bus.new_hub(zero_copy=True))
    link, _ = await bus.link(b"prefill-0-1", zero_copy=True, high_water_mark=1)
    buffer = bytearray(128 * KIB)
    for i in range(50):
        buffer[:] = bytes([i]) * len(buffer)
        assert link.send([b"tag", buffer]) is None
    for i in range(50):
        assert (await bus.messages.get())[1][1] == bytes([i]) * len(buffer)


async def test_a_peer_of_an_old_zmtp_is_ignored_and_stops_nobody(bus: Bus) -> None:
    """Bytes at random are ZMTP 1.0 to libzmq, which knows no descriptor of such a connection."""
    host, _, port = bus.endpoint.removeprefix("tcp://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    anonymous, message = b"\x01\x00", b"\x02\x01a\x02\x00b"
    writer.write(anonymous + message * 3)
    await writer.drain()
    link, _ = await bus.link(b"decode-0-1")
    for number in range(3):
        link.send([b"%d" % number])
        assert await bus.messages.get() == (b"decode-0-1", [b"%d" % number])
    writer.close()


async def test_a_part_over_the_limit_is_refused_here_and_cut_off_there(bus: Bus) -> None:
    await bus.replace_hub(bus.new_hub(max_message_bytes=KIB))
    small, _ = await bus.link(b"decode-0-1", max_message_bytes=KIB)
    with pytest.raises(LocalProtocolError):
        small.send([b"tag", bytes(KIB + 1)])
    rude, told = await bus.link(b"decode-1-1")
    rude.send([b"tag", bytes(KIB + 1)])
    assert await told.get() == "down"
    small.send([b"tag", bytes(KIB)])
    assert await bus.messages.get() == (b"decode-0-1", [b"tag", bytes(KIB)])


async def test_closing_sends_the_queue_and_then_nothing(bus: Bus) -> None:
    link, _ = await bus.link(b"decode-0-1", high_water_mark=1)
    for _ in range(2000):
        link.send([b"tag", b"header"])
    assert link.queued_bytes > 0
    closing = asyncio.create_task(link.close(linger_s=10.0))
    for _ in range(2000):
        await bus.messages.get()
    await closing
    await link.close()
    with pytest.raises(PeerLost):
        link.send([b"tag", b"header"])
    with pytest.raises(PeerLost):
        bus.hub.send(b"nobody", [b"tag", b"header"])


async def test_the_queue_of_a_lost_peer_is_dropped_and_its_buffers_freed(bus: Bus) -> None:
    link, told = await bus.link(b"decode-0-1", max_queue_bytes=64 * KIB, max_message_bytes=8 * KIB)
    await bus.hub.close()
    assert await told.get() == "down"
    sending = link.send([b"tag", b"header"], track=True)
    assert sending is not None and not sending.done
    with pytest.raises(WireError) as caught:
        for _ in range(100):
            link.send([b"tag", bytes(8 * KIB)])
    assert caught.value.code is ErrorCode.OVERLOADED
    assert link.queued_bytes <= 64 * KIB
    await link.close()
    assert sending.done and sending.was_dropped
    bus.hub = bus.new_hub()


async def test_new_connections_go_to_a_successor_and_the_others_stay(bus: Bus) -> None:
    link, _ = await bus.link(b"decode-0-1")
    link.send([b"to the old"])
    assert await bus.messages.get() == (b"decode-0-1", [b"to the old"])
    heard: asyncio.Queue[list[Buffer]] = asyncio.Queue()
    successor = Hub(lambda peer, parts: heard.put_nowait(parts))
    listener = os.dup(bus.hub.listener)
    bus.hub.stop_accepting()
    bus.hub.stop_accepting()  # twice is once
    assert successor.bind(bus.endpoint, listener) == bus.endpoint
    other, _ = await bus.link(b"decode-0-1")  # the identity is free there
    other.send([b"to the new"])
    assert await heard.get() == [b"to the new"]
    link.send([b"again"])
    assert await bus.messages.get() == (b"decode-0-1", [b"again"])
    await successor.close()
    bus.hub.accept_again()
    third, _ = await bus.link(b"decode-1-1")
    third.send([b"back"])
    assert await bus.messages.get() == (b"decode-1-1", [b"back"])
    bus.hub.stop_accepting()
    await bus.hub.close()  # libzmq closes its own socket


async def test_an_endpoint_that_cannot_be_had_is_named(bus: Bus) -> None:
    other = bus.new_hub()
    with pytest.raises(OSError, match=f"cannot bind {bus.endpoint}"):
        other.bind(bus.endpoint)
    await other.close()
    with pytest.raises(OSError, match="cannot connect nonsense"):
        Link(b"decode-0-1", "nonsense", lambda parts: None)


async def test_1_a_tracked_message_is_not_done_while_any_frame_is_unsent(
    bus: Bus, relay: Relay
) -> None:
    await bus.replace_hub(bus.new_hub(zero_copy=True))
    link, _ = await bus.link(b"prefill-0-1", relay.endpoint, zero_copy=True)
    relay.gate.clear()
    kv = [bytearray(bytes([i]) * (8 << 20)) for i in range(4)]
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
        _, parts = await bus.messages.get()
        assert parts[2] == bytes([i]) * (8 << 20)


async def test_2_a_stalled_reader_is_not_disconnected(bus: Bus) -> None:
    def stall(peer: bytes, parts: list[Buffer]) -> None:
        time.sleep(0.005)  # the loop is blocked, as by a step of a careless engine
        bus.on_message(peer, parts)

    await bus.replace_hub(Hub(stall, high_water_mark=4))
    link, told = await bus.link(b"prefill-0-1", high_water_mark=4)
    for i in range(65):
        link.send([b"tag", b"%d" % i, bytes(64 * KIB)])
    for i in range(65):
        _, parts = await bus.messages.get()
        assert parts[1] == b"%d" % i
    assert told.empty()


async def test_4_no_one_takes_over_the_identity_of_a_connected_peer(bus: Bus) -> None:
    owner, told_owner = await bus.link(b"decode-3-100")
    owner.send([b"owner"])
    await bus.messages.get()
    thief, told_thief = await bus.link(b"decode-3-100")
    thief.send([b"thief"])
    for _ in range(100):
        owner.send([b"owner"])
        assert await bus.messages.get() == (b"decode-3-100", [b"owner"])
        bus.hub.send(b"decode-3-100", [b"reply"])
        assert await told_owner.get() == [b"reply"]
    assert bus.messages.empty() and told_thief.empty()


async def test_5_a_full_peer_is_bounded_and_costs_no_other_peer_a_message(
    bus: Bus, relay: Relay
) -> None:
    bounds = {"max_queue_bytes": 1 << 20, "max_message_bytes": 256 * KIB}
    await bus.replace_hub(bus.new_hub(high_water_mark=2, **bounds))
    full, told_full = await bus.link(b"decode-0-1", relay.endpoint)
    idle, told_idle = await bus.link(b"decode-1-1")
    for link in (full, idle):
        link.send([b"hello"])
        await bus.messages.get()
    relay.gate.clear()
    num_sent = 0
    with pytest.raises(WireError) as caught:
        while num_sent < 100_000:
            bus.hub.send(b"decode-0-1", [b"tag", b"%d" % num_sent, bytes(256 * KIB)])
            num_sent += 1
    assert caught.value.code is ErrorCode.OVERLOADED
    assert bus.hub.queued_bytes(b"decode-0-1") <= 1 << 20
    for i in range(500):
        bus.hub.send(b"decode-1-1", [b"%d" % i])
        assert await told_idle.get() == [b"%d" % i]
    assert num_sent > told_full.qsize()
    relay.gate.set()
    for i in range(num_sent):
        parts = await told_full.get()
        assert isinstance(parts, list) and parts[1] == b"%d" % i
