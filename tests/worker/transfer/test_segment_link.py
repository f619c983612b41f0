"""The prefill worker's end of a connection for segments: how it opens, ends, and opens again."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.oracle import oracle
from tests.wire.process.key_files import write
from tests.worker.scripted import (
    GatedExecutor,
    ScriptedDecode,
    ScriptedRouter,
    running,
    running_prefill,
    scripted_router,
)
from tests.worker.transfer.segments import DESCRIPTOR, PEER, WAIT_S, Taking, greet, hub_of
from wire.errors import ErrorCode, PeerLost
from wire.frames import Cancel, KvCache, Role, Tag
from wire.options import Options
from wire.process.frame_counters import Traffic
from wire.process.keys import Keys
from wire.transfer import HEAD_BYTES, read_head, segment_head
from worker.executor.hash import LAYOUT
from worker.transfer.segment_hub import SegmentHub
from worker.transfer.segment_link import SILENCE_S, Connection, SegmentLink, send_all

PROMPT = [(11 * i) % 1000 for i in range(300)]
TOTAL = len(PROMPT) * LAYOUT.token_bytes
OPTIONS = Options(max_tokens=4, ignore_eos=True)
KV_ENDPOINT = "tcp://127.0.0.1:5600"


class Ends:
    """A link whose ends are waited for."""

    def __init__(self, kv_endpoint: str = KV_ENDPOINT) -> None:
        self.down = asyncio.Event()
        self.link = SegmentLink(kv_endpoint, Traffic(), self.down.set)

    async def until_up(self, hub: SegmentHub[Any]) -> None:
        hub.expect(PEER, self.link.token)
        self.link.open(hub.port, self.link.token)
        await self.connected()
        assert self.link.is_up

    async def connected(self) -> None:
        """Wait until it is up, or will not be."""
        assert self.link.connecting is not None
        await asyncio.wait_for(self.link.connecting, WAIT_S)

    async def send(self, number: int, kv: bytes) -> None:
        head = segment_head(KvCache(1, number, 9), DESCRIPTOR, len(kv))
        await self.link.run(send_all, [head, kv], num_bytes=len(kv))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_segments_arrive_in_order(host: str) -> None:
    taking = Taking()
    ends = Ends("tcp://[::1]:5600" if ":" in host else KV_ENDPOINT)
    async with hub_of(taking, host) as hub:
        await ends.until_up(hub)
        sent = [(number, bytes([number]) * (1 << 2 * number)) for number in range(1, 10)]
        await asyncio.gather(*(ends.send(*segment) for segment in sent))
        assert [await taking.next() for _ in sent] == [(*segment, None) for segment in sent]
        await ends.link.close()


async def test_a_lost_connection_is_reported_and_its_token_replaced() -> None:
    taking, ends = Taking(), Ends()
    async with hub_of(taking) as hub:
        first = ends.link.token
        await ends.until_up(hub)
        ends.link.open(hub.port, first)  # once is enough
    await asyncio.wait_for(ends.down.wait(), WAIT_S)
    assert not ends.link.is_up and ends.link.token != first
    with pytest.raises(PeerLost):
        await ends.send(1, b"hello")
    async with hub_of(taking) as hub:
        ends.link.open(hub.port, first)  # an answer to an offer from before
        assert not ends.link.is_up
        await ends.until_up(hub)
        await ends.send(2, b"hello")
        assert await taking.next() == (2, b"hello", None)
        await ends.link.close()


async def test_a_send_fails_when_the_connection_is_lost() -> None:
    """The other end reads nothing, so the thread sleeps in the middle of a segment."""
    ends = Ends()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        ends.link.open(listening.getsockname()[1], ends.link.token)
        connecting = ends.link.connecting
        client = await greet(listening)
        assert connecting is not None
        await connecting
        loop = asyncio.get_running_loop()
        sending = [asyncio.create_task(ends.send(n, bytes(64 << 20))) for n in (1, 2)]
        await loop.sock_recv(client, 1)
        client.close()
        for error in await asyncio.gather(*sending, return_exceptions=True):
            assert isinstance(error, PeerLost)
        assert ends.down.is_set() and not ends.link.is_up
    await ends.link.close()


async def test_a_lost_connection_does_not_block_the_loop_on_a_read() -> None:
    """A device, or another process of the model, may take its time over a copy."""
    ends, is_reading, is_noticed = Ends(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def read(_: socket.socket) -> bool:
        loop.call_soon_threadsafe(is_reading.set)
        return is_noticed.wait(WAIT_S / 2)

    async with hub_of(Taking()) as hub:
        await ends.until_up(hub)
        reading = asyncio.create_task(ends.link.run(read, num_bytes=1))
        await asyncio.wait_for(is_reading.wait(), WAIT_S)
    await asyncio.wait_for(ends.down.wait(), WAIT_S)
    is_noticed.set()
    assert await asyncio.wait_for(reading, WAIT_S), "the loop stood still"
    await ends.link.close()


@pytest.mark.parametrize(
    ("what", "error"), [("select.epoll", OSError), ("Copies", OSError), ("Copies", RuntimeError)]
)
async def test_the_socket_is_closed_without_a_descriptor_or_thread(
    what: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(f"worker.transfer.segment_link.{what}", fail)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(error):
        Connection(ours, lambda: None)
    assert ours.fileno() == -1, "it is closed"


async def test_a_refused_token_is_replaced() -> None:
    ends, taking = Ends(), Taking()
    async with hub_of(taking) as hub:
        first = ends.link.token
        with capture_logs() as logs:
            ends.link.open(hub.port, first)
            await ends.connected()
        assert ends.link.token != first and "no connection for segments" in str(logs)
        assert not ends.down.is_set(), "nothing was on it"
        await ends.until_up(hub)
        await ends.link.close()


@pytest.mark.parametrize("endpoint", [KV_ENDPOINT, "tcp://no.such.host.invalid:5600"])
async def test_a_failed_connection_is_logged_once(endpoint: str) -> None:
    ends = Ends(endpoint)
    with capture_logs() as logs:
        for _ in range(3):
            token = ends.link.token
            ends.link.open(1, token)  # where nobody listens
            await ends.connected()
            assert ends.link.token != token
    assert [line["event"].partition(",")[0] for line in logs] == ["no connection for segments"]


async def test_reset_ends_a_connection_attempt() -> None:
    """A reply to the previous token does not count for the next."""
    ends = Ends()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        ends.link.open(port, ends.link.token)
        client, _ = await asyncio.get_running_loop().sock_accept(listening)
        ends.link.reset()
        assert ends.link.connecting is None
        with client:
            client.setblocking(False)
            while await asyncio.get_running_loop().sock_recv(client, 100):
                pass  # it is hung up
        ends.link.open(port, ends.link.token)
        with await greet(listening):
            await ends.connected()
            assert ends.link.is_up
            await ends.link.close()


async def test_a_silent_listener_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.transfer.segment_link.CONNECT_TIMEOUT_S", 0.05)
    ends = Ends()
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as logs:
        ends.link.open(silent.getsockname()[1], first := ends.link.token)
        await ends.connected()
    assert not ends.link.is_up and ends.link.token != first
    assert [line["reason"] for line in logs] == ["no answer"]


async def test_reset_wakes_a_blocked_thread() -> None:
    """The other end neither reads nor hangs up."""
    ends = Ends()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        ends.link.open(listening.getsockname()[1], ends.link.token)
        with await greet(listening) as client:
            await ends.connected()
            sending = asyncio.create_task(ends.send(1, bytes(64 << 20)))
            await asyncio.get_running_loop().sock_recv(client, 1)
            ends.link.reset()
            with pytest.raises(PeerLost):
                await sending
    assert not ends.down.is_set(), "who asks for it knows"
    await ends.link.close()


async def test_a_connection_has_no_delay_and_a_user_timeout() -> None:
    ends, found = Ends(), list[int]()

    def look(connected: socket.socket) -> None:
        for option in (socket.TCP_NODELAY, socket.TCP_USER_TIMEOUT):
            found.append(connected.getsockopt(socket.IPPROTO_TCP, option))

    async with hub_of(Taking()) as hub:
        await ends.until_up(hub)
        await ends.link.run(look, num_bytes=1)
        await ends.link.close()
    assert found == [1, SILENCE_S * 1000], "in milliseconds"


async def offered_beside(
    router: ScriptedRouter, decode: ScriptedDecode, listening: socket.socket
) -> socket.socket:
    """Ask for the prompt as request 1, and return the connection for all segments but the first."""
    router.prefill(1, PROMPT, OPTIONS)
    await decode.offered(1)
    decode.ack(1, 0, LAYOUT.token_bytes, segment_port=listening.getsockname()[1])
    client = await greet(listening)
    await decode.segment(1)  # it did not wait for the connection
    return client


async def test_a_lost_connection_ends_the_request_it_sends_for() -> None:
    async with running_prefill(kv_shared_memory="off") as (router, decode):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            port = listening.getsockname()[1]
            client = await offered_beside(router, decode, listening)
            decode.ack(1, LAYOUT.token_bytes, TOTAL, segment_port=port)
            head = await asyncio.get_running_loop().sock_recv(client, HEAD_BYTES)
            assert read_head(head)[0].request_id == 1
            client.close()
            message = await router.receive_any()
            while message.tag is not Tag.ERROR:
                message = await router.receive_any()
            await router.until_free(Role.PREFILL)


async def test_blocks_are_kept_while_a_segment_is_read() -> None:
    """On the thread of the connection, though the transfer is over."""
    executor = GatedExecutor()
    settings: dict[str, Any] = {"kv_shared_memory": "off", "prefix_cache": False}
    async with running_prefill(executor=executor, **settings) as (router, decode):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            port = listening.getsockname()[1]
            with await offered_beside(router, decode, listening):
                executor.cache.gate.clear()
                executor.cache.is_reached.clear()
                decode.ack(1, LAYOUT.token_bytes, TOTAL, segment_port=port)
                await executor.cache.until_reached()
                router.send(Role.PREFILL, Cancel(1, ErrorCode.CANCELLED))
                cancel = await decode.receive_past_keepalives()
                assert cancel.frame == Cancel(1, ErrorCode.CANCELLED)
                await router.load(Role.PREFILL)
                assert (await router.load(Role.PREFILL)).used, "they are read"
                executor.cache.gate.set()
                await router.until_free(Role.PREFILL)


@pytest.mark.parametrize("has_keys", [False, True])
async def test_two_workers_use_the_connection_and_log_no_secret(
    tmp_path: Path, has_keys: bool
) -> None:
    write(tmp_path, "router", "prefill-0", "decode-0")
    keys = tmp_path if has_keys else None
    with capture_logs() as logs:
        async with (
            scripted_router(Keys(tmp_path, "router") if keys else None) as router,
            running(router, "decode", keys=keys, kv_unasked_bytes=0) as decode,
            running(router, "prefill", keys=keys, kv_shared_memory="off") as prefill,
        ):
            request_id, traffic = 0, decode.worker.role.segment_traffic
            while not traffic.received:  # until it is up, the KV socket is taken
                request_id += 1
                prompt = [request_id, *PROMPT]
                router.prefill(request_id, prompt, OPTIONS)
                await router.receive(Tag.PREFILL_DONE)
                expected = oracle(prompt, 4, OPTIONS)
                router.decode(request_id, [*prompt, expected[0]], 3, OPTIONS)
                assert await router.tokens(3) == expected[1:]
                await router.receive(Tag.DECODE_DONE)
            await router.until_free(Role.PREFILL, Role.DECODE)
            assert prefill.worker.role.segment_traffic.sent == traffic.received
    text = str(logs)
    assert "segments have a connection of their own" in text
    assert "key=" not in text and "token=" not in text and "\\x" not in text
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-segments"]
