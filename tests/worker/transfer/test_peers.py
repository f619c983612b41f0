"""Links to decode workers come and go with PEERS; one that closes takes its transfers along."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.ports import free_port
from tests.wire.process.key_files import write
from tests.worker.scripted import ScriptedDecode, running, scripted_router
from tests.worker.transfer.segments import WAIT_S, greet
from wire.errors import ErrorCode, PeerLost, WireError
from wire.frames import Cancel, Error, Heartbeat, KvCache, KvCacheAck, Peers, Role
from wire.options import Options
from wire.payloads import Credit, PeerDetail, encode_map
from wire.process.frame_counters import Traffic
from wire.process.keys import Keys
from worker.transfer.peers import KEEP_S, MAX_KEPT, DecodePeer, DecodePeers
from worker.transfer.sockets import KVPlane

PROMPT = list(range(100))
OPTIONS = Options(max_tokens=20, ignore_eos=True)


class Recorder:
    """A transfer that only listens."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[object] = asyncio.Queue()

    def on_ack(self, ack: KvCacheAck, credit: Credit) -> None:
        self.heard.put_nowait((ack, credit))

    def on_error(self, code: int, message: str) -> None:
        self.heard.put_nowait((code, message))

    def fail(self, error: WireError) -> None:
        self.heard.put_nowait(error)

    async def hear(self) -> object:
        return await asyncio.wait_for(self.heard.get(), 30)


def detail(endpoint: str, rank: int = 0, epoch: int = 1, role: str = "decode") -> PeerDetail:
    return PeerDetail(rank=rank, epoch=epoch, kv_endpoint=endpoint, role=role)


@asynccontextmanager
async def decode_peers(
    identity: bytes = b"prefill-0-1", **settings: Any
) -> AsyncIterator[DecodePeers]:
    plane = KVPlane(1000)
    peers = DecodePeers(identity, plane, **settings)
    try:
        yield peers
    finally:
        await peers.close()
        await plane.close()


async def open_transfer(peer: DecodePeer, decode: ScriptedDecode) -> Recorder:
    recorder = peer.receivers[1] = Recorder()
    peer.send(KvCache(1, 0, 0))
    assert (await decode.receive()).frame == KvCache(1, 0, 0)
    return recorder


async def connected(peers: DecodePeers, decode: ScriptedDecode) -> tuple[DecodePeer, Recorder]:
    """Announce the decode worker as rank 0 of router "a", and open a transfer to it."""
    peers.update("a", [detail(decode.endpoint)])
    peer = peers.find("a", 0)
    assert peer is not None
    return peer, await open_transfer(peer, decode)


async def test_a_rank_is_found_by_the_router_that_named_it() -> None:
    async with decode_peers() as peers, ScriptedDecode() as one, ScriptedDecode() as two:
        peers.update("a", [detail(one.endpoint, 3), detail(two.endpoint, 5)])
        peers.update("b", [detail(one.endpoint, 3)])
        first, second = peers.find("a", 3), peers.find("a", 5)
        assert first is not None and second is not None and first is not second
        assert peers.find("b", 3) is first  # one link, whoever names it
        assert peers.find("a", 0xFFFFFFFF) is first
        assert peers.find("b", 5) is None and peers.find("c", 3) is None
        assert (first.name, second.name) == ("decode-3", "decode-5")


async def test_a_link_is_kept_a_while_and_as_long_as_it_is_needed() -> None:
    async with decode_peers() as peers, ScriptedDecode() as decode:
        peer, recorder = await connected(peers, decode)
        start = peer.needed_at
        peers.update("a", [])
        assert peers.find("a", 0) is None
        peers.tick(start + 2 * KEEP_S)  # a transfer is under way
        peer.receivers.clear()
        peers.tick(start + 3 * KEEP_S - 1)
        peers.update("a", [detail(decode.endpoint, epoch=2)])
        assert peers.find("a", 0) is peer  # named again, the same link
        peers.update("a", [])
        peers.tick(start + 4 * KEEP_S)
        peers.update("a", [detail(decode.endpoint)])
        assert peers.find("a", 0) is not peer
        assert recorder.heard.empty()


async def test_a_worker_does_not_connect_to_itself_nor_before_it_sends_kv() -> None:
    async with (
        decode_peers(b"any-1-7", connects_early=False) as peers,
        ScriptedDecode() as decode,
    ):
        own = detail("tcp://127.0.0.1:9", 1, 7, "any")
        peers.update("a", [own, detail(decode.endpoint)])
        assert peers.num_links == 0
        assert peers.find("a", 1) is None
        peer = peers.find("a", 0)
        assert peer is not None and peers.num_links == 1
        await open_transfer(peer, decode)


async def test_the_key_expected_is_that_of_the_role_and_rank_listed(tmp_path: Path) -> None:
    write(tmp_path, "decode-0", "any-0", "any-1")
    plane = KVPlane(1000, Keys(tmp_path, "any-1"))
    peers = DecodePeers(b"any-1-7", plane)
    async with ScriptedDecode(keys=Keys(tmp_path, "any-0")) as decode:
        peers.update("a", [detail(decode.endpoint, role="any")])
        peer = peers.find("a", 0)
        assert peer is not None and peer.name == "any-0"
        await open_transfer(peer, decode)
        await peers.close()
        await plane.close()


async def test_unnamed_links_are_limited() -> None:
    async with decode_peers() as peers, ScriptedDecode() as decode:
        peers.update("b", [detail(decode.endpoint, 7)])
        needed = peers.find("b", 7)
        assert needed is not None
        await open_transfer(needed, decode)
        peers.update("b", [])
        for port in range(1000, 1000 + 3 * MAX_KEPT):
            peers.update("a", [detail(f"tcp://127.0.0.1:{port}", 1)])
            peers.update("a", [])
        assert peers.num_links == MAX_KEPT + 1, "and the one with a transfer"
        peers.update("b", [detail(decode.endpoint, 7)])
        assert peers.find("b", 7) is needed


async def test_a_wrong_rank_does_not_keep_an_endpoint(
    tmp_path: Path,
) -> None:
    write(tmp_path, "prefill-0", "decode-0", "decode-1")
    plane = KVPlane(1000, Keys(tmp_path, "prefill-0"))
    peers = DecodePeers(b"prefill-0-1", plane)
    async with ScriptedDecode(keys=Keys(tmp_path, "decode-0")) as decode:
        false, true = detail(decode.endpoint, 1), detail(decode.endpoint, 0)
        peers.update("a", [false])
        for named in ([false, true], [true, false]):
            peers.update("a", named)
            peer = peers.find("a", 0)
            assert peer is not None
            await open_transfer(peer, decode)
            assert peers.find("a", 1) is peer, "one link an endpoint"
        await peers.close()
        await plane.close()


async def test_a_lost_peer_fails_its_transfers() -> None:
    async with decode_peers() as peers:
        decode = ScriptedDecode(f"tcp://127.0.0.1:{free_port()}")
        peer, recorder = await connected(peers, decode)
        await decode.close()
        assert isinstance(await recorder.hear(), PeerLost)
        async with ScriptedDecode(decode.endpoint) as restarted:
            peer.send(KvCache(2, 0, 0))  # the link finds its successor
            assert (await restarted.receive()).frame == KvCache(2, 0, 0)


@pytest.mark.parametrize("end", ["the peer is lost", "nobody needs it"])
async def test_the_connection_for_segments_ends_with_the_other(end: str) -> None:
    async with decode_peers(segment_traffic=Traffic()) as peers, ScriptedDecode() as decode:
        peer, _ = await connected(peers, decode)
        assert peer.segments is not None
        peer.receivers.clear()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            peer.segments.open(listening.getsockname()[1], peer.segments.token)
            with await greet(listening) as client:
                assert peer.segments.connecting is not None
                await peer.segments.connecting
                assert peer.segments.is_up
                if end == "the peer is lost":
                    await decode.close()
                else:
                    peers.update("a", [])
                    peers.tick(peer.needed_at + KEEP_S)
                receiving = asyncio.get_running_loop().sock_recv(client, 1)
                assert await asyncio.wait_for(receiving, WAIT_S) == b"", "it is hung up"


@pytest.mark.parametrize(("traffic", "platform"), [(None, "linux"), (Traffic(), "darwin")])
async def test_no_segment_connection_if_off_or_not_on_linux(
    traffic: Traffic | None, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.transfer.peers.sys", SimpleNamespace(platform=platform))
    async with decode_peers(segment_traffic=traffic) as peers, ScriptedDecode() as decode:
        peers.update("a", [detail(decode.endpoint)])
        peer = peers.find("a", 0)
        assert peer is not None and peer.segments is None


async def test_frames_are_counted_and_connections_that_are_up() -> None:
    async with decode_peers() as peers, ScriptedDecode() as decode:
        peer, recorder = await connected(peers, decode)
        decode.ack(1, 0, 5)
        await recorder.hear()
        assert peers.num_up == 1
        rows = {("kv_cache", "sent", 1), ("kv_cache_ack", "received", 1)}
        traffic = peers.plane.traffic
        assert set(traffic.rows()) == rows
        await peers.close()
        with suppress(PeerLost):
            peer.send(Cancel(9, 0))
        assert (set(traffic.rows()), traffic.dropped) == (rows, {"worker_lost": 1})
        assert peers.num_up == 0


async def test_answers_reach_their_transfer_and_no_other() -> None:
    async with decode_peers() as peers, ScriptedDecode() as decode:
        _, recorder = await connected(peers, decode)
        decode.ack(2, 0, 5)
        decode.send(Error(3, ErrorCode.INTERNAL))
        decode.ack(1, 0, 7)
        assert await recorder.hear() == (KvCacheAck(1, 0), Credit(7, 0, 0))
        decode.send(Error(1, ErrorCode.OUT_OF_BLOCKS))
        assert await recorder.hear() == (ErrorCode.OUT_OF_BLOCKS, "")


async def test_bad_frames_are_answered_and_survived() -> None:
    async with decode_peers() as peers, ScriptedDecode() as decode:
        _, recorder = await connected(peers, decode)
        decode.send(Heartbeat(0, 0, 0))
        assert (await decode.receive()).frame == Error(0, ErrorCode.PROTOCOL)
        decode.send(KvCacheAck(1, 0), b"short")
        error = await recorder.hear()
        assert isinstance(error, WireError) and error.code is ErrorCode.PROTOCOL
        decode.ack(1, 0, 7)
        assert isinstance(await recorder.hear(), WireError | tuple)


async def test_closed_peers_open_nothing() -> None:
    """A decode worker that leaves with us makes its router send PEERS while we close."""
    async with decode_peers() as peers, ScriptedDecode() as decode:
        await peers.close()
        peers.update("a", [detail(decode.endpoint)])
        assert peers.find("a", 0) is None


async def test_a_bad_endpoint_is_skipped() -> None:
    async with decode_peers() as peers, ScriptedDecode() as decode:
        peers.update("a", [detail("nowhere", 1), detail(decode.endpoint, 2)])
        assert peers.find("a", 1) is None
        assert peers.find("a", 2) is not None


async def test_a_decode_worker_no_longer_named_is_refused() -> None:
    async with (
        scripted_router() as router,
        ScriptedDecode() as decode,
        running(router, "prefill"),
    ):
        router.announce(decode.endpoint)
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        router.send(Role.PREFILL, Peers(router.epoch, 0), encode_map([]))
        router.prefill(2, PROMPT, OPTIONS)
        messages = [await router.receive_any() for _ in range(2)]
        assert Error(2, ErrorCode.NO_WORKER) in [message.frame for message in messages]
        decode.ack(1, 0, 0)  # the one under way goes on
        router.send(Role.PREFILL, Cancel(1, ErrorCode.CANCELLED))
        assert (await decode.receive()).frame == Cancel(1, ErrorCode.CANCELLED)
        await router.until_free(Role.PREFILL)
