"""Sealed KV between real sockets: who is let in, what is taken, and what is lost with the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.kv import whole
from tests.wire.process.key_files import write
from tests.worker.scripted import (
    Process,
    ScriptedDecode,
    ScriptedPrefill,
    ScriptedRouter,
    running,
    scripted_router,
)
from wire.aio.tokens import name_of, new_token
from wire.aio.zmq import Link
from wire.errors import ErrorCode, PeerLost
from wire.frames import Cancel, Error, KvCache, Role, Tag
from wire.options import Options
from wire.parts import Buffer, encode
from wire.payloads import PeerDetail
from wire.process.keys import Keys
from wire.process.traffic import Traffic
from wire.transfer import MAX_SEALED_BYTES, Sealing, SegmentDescriptor, new_key
from worker.executor.hash import LAYOUT, oracle
from worker.transfer.peers import DecodePeer
from worker.transfer.sealed import PATIENCE_S, SealedHub, SealedLink
from worker.transfer.sockets import KVPlane, SealedPlane

PROMPT = [(11 * i) % 1000 for i in range(300)]
TOTAL = len(PROMPT) * LAYOUT.token_bytes
OPTIONS = Options(max_tokens=4, ignore_eos=True)
PARTIES = ("router", "prefill-0", "prefill-1", "decode-0")
WAIT_S = 10
MAX_QUEUE_BYTES = 64 << 20


def prompt_of(request_id: int) -> list[int]:
    """One of its own: equal ones wait for each other."""
    return [request_id, *PROMPT[1:]]


class SealingPrefill(ScriptedPrefill):
    """A prefill worker that offers a key and a token, and sends to the sealed port."""

    def __init__(self, router: ScriptedRouter, keys: Path, rank: int = 0) -> None:
        self.identity = b"prefill-%d-1" % rank
        self.key, self.token, self.port = new_key(), new_token(), 0
        self.went: asyncio.Queue[str] = asyncio.Queue()
        self._way: Link | None = None
        security = {"keys": Keys(keys, f"prefill-{rank}"), "server": "decode-0"}
        super().__init__(router, self.identity, **security)

    async def close(self) -> None:
        if self._way is not None:
            await self._way.close()
        await super().close()

    async def accepted(self, request_id: int, **changes: Any) -> int:
        """Offer and be granted credit; return the port for sealed segments."""
        self.offer(request_id, prompt_of(request_id), key=self.key, token=self.token, **changes)
        _, credit = await self.ack()
        self.port = credit.sealed_port
        return self.port

    async def connect(self, number: int = 0) -> str:
        """Connect to the sealed port; return how that went."""
        if self._way is not None:
            await self._way.close()
        self._way = Link(
            name_of(self.identity, number),
            f"tcp://127.0.0.1:{self.port}",
            lambda parts: None,
            on_up=lambda: self.went.put_nowait("up"),
            on_down=lambda: self.went.put_nowait("down"),
            on_refused=lambda: self.went.put_nowait("refused"),
            token=self.token,
        )
        return await self.next()

    async def next(self) -> str:
        return await asyncio.wait_for(self.went.get(), WAIT_S)

    def put(self, *parts: Buffer) -> None:
        assert self._way is not None
        self._way.send(parts)

    def sealed(
        self, request_id: int, tokens: range = range(300), number: int = 1, num_segments: int = 1
    ) -> list[Buffer]:
        """The parts of a sealed segment of zeros."""
        kv = bytes(len(tokens) * LAYOUT.token_bytes)
        descriptor = SegmentDescriptor.of(whole(LAYOUT, tokens.start, len(tokens)), len(kv), 0)
        frame = KvCache(request_id, number, num_segments)
        sealed = Sealing(self.key).seal(frame, descriptor, kv)
        return encode(frame, descriptor.pack(), sealed)


Stage = tuple[ScriptedRouter, SealingPrefill, Process]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write(tmp_path, *PARTIES)
    return tmp_path


@asynccontextmanager
async def stage(keys: Path, **settings: Any) -> AsyncIterator[Stage]:
    """A real decode worker with keys between a router and a prefill worker of the test's."""
    async with (
        scripted_router(Keys(keys, "router")) as router,
        running(router, "decode", keys=keys, **settings) as process,
        SealingPrefill(router, keys) as prefill,
    ):
        yield router, prefill, process


async def test_sealed_segments_are_stored_in_any_order_beside_others(keys: Path) -> None:
    async with stage(keys) as (router, prefill, process):
        assert await prefill.accepted(1)
        assert await prefill.connect() == "up"
        prefill.put(*prefill.sealed(1, range(200, 300), 3, 3))
        assert (await prefill.ack())[0].kv_bytes == 100 * LAYOUT.token_bytes
        prefill.segment(1, range(100, 200), 2, 3)  # over CURVE
        assert (await prefill.ack())[0].kv_bytes == 200 * LAYOUT.token_bytes
        prefill.put(*prefill.sealed(1, range(100), 1, 3))
        ack, credit = await prefill.ack()
        assert (ack.kv_bytes, credit.ready, credit.sealed_port) == (TOTAL, 1, prefill.port)
        router.decode(1, [*prompt_of(1), 5], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)
        assert dict(process.worker.role.sealed_traffic.received) == {Tag.KV_CACHE: 2}


@pytest.mark.parametrize("part", [2, 3])
@pytest.mark.parametrize("how", ["changed", "cut"])
async def test_what_was_tampered_with_fails_its_transfer_and_no_other(
    keys: Path, part: int, how: str
) -> None:
    async with stage(keys) as (router, prefill, _):
        for request_id in (1, 2):
            await prefill.accepted(request_id)
        await prefill.connect()
        parts = prefill.sealed(1)
        data = bytes(parts[part])
        parts[part] = data[:-1] if how == "cut" else data[:4] + bytes([data[4] ^ 1]) + data[5:]
        prefill.put(*parts)
        request_id, code = await prefill.error()
        assert request_id == 1 and code in (ErrorCode.TRANSFER_FAILED, ErrorCode.PROTOCOL)
        prefill.put(*prefill.sealed(2))
        assert (await prefill.ack())[1].ready
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


async def test_what_was_sealed_for_another_place_does_not_open(keys: Path) -> None:
    async with stage(keys) as (router, prefill, _):
        await prefill.accepted(1)
        await prefill.connect()
        one, two = (prefill.sealed(1, range(n * 150, (n + 1) * 150), n + 1, 2) for n in range(2))
        prefill.put(*one[:3], two[3])
        assert await prefill.error() == (1, ErrorCode.TRANSFER_FAILED)
        await router.until_free(Role.DECODE)


async def test_copies_and_latecomers_change_nothing_and_get_no_answer(keys: Path) -> None:
    async with stage(keys) as (router, prefill, _):
        await prefill.accepted(1)
        await prefill.connect()
        first = prefill.sealed(1, range(100), 1, 2)
        for _ in range(3):
            prefill.put(*first)
        prefill.put(*prefill.sealed(7))  # of no transfer
        prefill.put(*encode(KvCache(1, 0, 0)))  # belongs to the other socket, as does the next
        prefill.put(*encode(Cancel(1, 12)))
        prefill.put(b"no", b"frame")
        prefill.put(*prefill.sealed(1, range(100, 300), 2, 2))
        acked = [(await prefill.ack())[0].kv_bytes for _ in range(2)]
        assert acked == [100 * LAYOUT.token_bytes, TOTAL]
        prefill.put(*first)  # after the end
        prefill.cancel(1)
        await router.until_free(Role.DECODE)
        assert prefill.is_quiet


async def test_a_peer_does_not_send_for_another(keys: Path) -> None:
    async with stage(keys) as (router, prefill, _), SealingPrefill(router, keys, 1) as other:
        await prefill.accepted(1)
        await other.accepted(2)
        await prefill.connect()
        await other.connect()
        other.key = prefill.key
        other.put(*other.sealed(1))  # even with the right key
        other.key = new_key()
        other.put(*other.sealed(2))
        assert await other.error() == (2, ErrorCode.TRANSFER_FAILED)
        assert prefill.is_quiet
        prefill.put(*prefill.sealed(1))
        assert (await prefill.ack())[1].ready
        prefill.cancel(1)
        await router.until_free(Role.DECODE)


async def test_strangers_and_wrong_tokens_do_not_get_past_the_handshake(keys: Path) -> None:
    async with stage(keys) as (_, prefill, process):
        await prefill.accepted(1)
        told, prefill.token = prefill.token, new_token()
        for number in range(20):
            assert await prefill.connect(number) == "refused"
        assert not process.worker.role.sealed_traffic.received
        prefill.token = told
        assert await prefill.connect() == "up"
        prefill.put(*prefill.sealed(1))
        assert (await prefill.ack())[1].ready


async def test_who_loses_its_curve_connection_loses_the_other(keys: Path) -> None:
    async with stage(keys) as (router, prefill, _):
        await prefill.accepted(1)
        assert await prefill.connect() == "up"
        prefill.put(*prefill.sealed(1, range(100), 1, 2))
        await prefill.ack()
        await ScriptedPrefill.close(prefill)
        assert await prefill.next() == "down"
        await router.until_free(Role.DECODE)


async def test_a_revoked_key_takes_both_connections_along(keys: Path) -> None:
    """Its transfers end, those of the others go on."""
    async with stage(keys) as (router, prefill, _), SealingPrefill(router, keys, 1) as other:
        await other.accepted(2)
        assert await other.connect() == "up"
        await prefill.accepted(1)
        assert await prefill.connect() == "up"
        prefill.put(*prefill.sealed(1, range(100), 1, 2))
        await prefill.ack()
        revoke(keys, "prefill-0")
        assert await prefill.next() == "down"
        assert await prefill.connect(1) == "refused"
        other.put(*other.sealed(2))
        assert (await other.ack())[1].ready
        other.cancel(2)
        await router.until_free(Role.DECODE)


def revoke(keys: Path, name: str) -> None:
    listed = keys / "authorized_keys"
    lines = listed.read_text().splitlines(keepends=True)
    listed.write_text("".join(line for line in lines if not line.endswith(f" {name}\n")))


@pytest.mark.parametrize("settings", [{"kv_sealing": "off"}, {"kv_bind": "ipc"}])
async def test_where_nothing_is_sealed_no_port_is_said(
    keys: Path, settings: dict[str, str]
) -> None:
    if settings.get("kv_bind"):
        settings = {"kv_bind": f"ipc://{keys}/kv"}
    async with stage(keys, **settings) as (_, prefill, _):
        assert await prefill.accepted(1) == 0
        prefill.segment(1, range(300))
        assert (await prefill.ack())[1].ready


async def test_without_keys_a_key_that_is_offered_is_not_used() -> None:
    async with (
        scripted_router() as router,
        running(router, "decode"),
        ScriptedPrefill(router) as prefill,
    ):
        prefill.offer(1, PROMPT, key=new_key(), token=new_token())
        assert (await prefill.ack())[1].sealed_port == 0


async def test_two_workers_with_keys_seal_and_their_logs_do_not_say_with_what(keys: Path) -> None:
    with capture_logs() as logs:
        async with (
            scripted_router(Keys(keys, "router")) as router,
            running(router, "decode", keys=keys, kv_unasked_bytes=0) as decode,
            running(router, "prefill", keys=keys, kv_shared_memory="off") as prefill,
        ):
            request_id, traffic = 0, decode.worker.role.sealed_traffic
            while not traffic.received:  # until the way is open, CURVE's is taken
                request_id += 1
                prompt = [request_id, *PROMPT]
                router.prefill(request_id, prompt, OPTIONS)
                await router.receive(Tag.PREFILL_DONE)
                expected = oracle(prompt, 4, OPTIONS)
                router.decode(request_id, [*prompt, expected[0]], 3, OPTIONS)
                assert await router.tokens(3) == expected[1:]
                await router.receive(Tag.DECODE_DONE)
            await router.until_free(Role.PREFILL, Role.DECODE)
            assert prefill.worker.role.sealed_traffic.sent == traffic.received
    text = str(logs)
    assert "sealed KV has a connection of its own" in text
    assert "key=" not in text and "token=" not in text and "\\x" not in text


# The prefill worker's end, against a decode worker of the test's.


class Ends(SealedPlane):
    """Sockets that tell when a connection is up or has ended, and what a `SealedLink` tells."""

    def __init__(self) -> None:
        super().__init__(MAX_QUEUE_BYTES)
        self.up, self.ended, self.down = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.now = 0.0
        self.traffic = Traffic()
        self.names: list[bytes] = []  # of connections, in order

    def link(
        self,
        name: bytes,
        endpoint: str,
        token: bytes,
        on_up: Callable[[], None],
        on_end: Callable[[], None],
    ) -> Link:
        def both(first: Callable[[], None], second: Callable[[], None]) -> None:
            first()
            second()

        self.names.append(name)
        up = partial(both, on_up, self.up.set)
        return super().link(name, endpoint, token, up, partial(both, on_end, self.ended.set))


@asynccontextmanager
async def way_to(endpoint: str) -> AsyncIterator[tuple[SealedLink, Ends]]:
    ends = Ends()
    way = SealedLink(ends, b"prefill-0-1", endpoint, ends.traffic, ends.down.set, lambda: ends.now)
    try:
        yield way, ends
    finally:
        await way.close()
        await ends.close()


@asynccontextmanager
async def entrance() -> AsyncIterator[tuple[SealedHub, asyncio.Queue[Any]]]:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    sockets = SealedPlane(MAX_QUEUE_BYTES)
    its = SealedHub(
        sockets, "tcp://127.0.0.1:0", 0, lambda peer, frame, _: heard.put_nowait((peer, frame))
    )
    try:
        yield its, heard
    finally:
        await its.close()
        await sockets.close()


async def heard_of(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), WAIT_S)
    event.clear()


async def test_a_way_that_is_lost_says_so_and_the_next_has_another_token() -> None:
    async with way_to("tcp://127.0.0.1:5600") as (way, ends):
        async with entrance() as (door, heard):
            door.expect(b"prefill-0-1", first := way.token)
            way.open(door.port, first)
            way.open(door.port, first)  # once is enough
            await heard_of(ends.up)
            assert way.is_up
            way.send(KvCache(1, 1, 1), b"descriptor", b"sealed")
            assert await asyncio.wait_for(heard.get(), WAIT_S) == (b"prefill-0-1", KvCache(1, 1, 1))
        await heard_of(ends.down)
        assert not way.is_up and way.token != first
        with pytest.raises(PeerLost):
            way.send(KvCache(1, 2, 2), b"descriptor", b"sealed")
        assert dict(ends.traffic.dropped) == {"worker_lost": 1}
        async with entrance() as (door, heard):
            way.open(door.port, first)  # an answer to an offer from before
            assert ends.names == [b"prefill-0-1/0"]
            door.expect(b"prefill-0-1", way.token)
            way.open(door.port, way.token)
            await heard_of(ends.up)
            assert ends.names == [b"prefill-0-1/0", b"prefill-0-1/1"]


async def test_a_way_that_is_refused_is_tried_again_with_another_token() -> None:
    async with way_to("tcp://127.0.0.1:5600") as (way, ends), entrance() as (door, _):
        way.open(door.port, first := way.token)
        await heard_of(ends.ended)
        assert not ends.down.is_set(), "nothing was on it"
        assert way.token != first
        door.expect(b"prefill-0-1", way.token)
        way.open(door.port, way.token)
        await heard_of(ends.up)
        with capture_logs() as logs:
            way.tick(ends.now + PATIENCE_S)
        assert not logs


async def test_who_is_lost_takes_the_other_way_along() -> None:
    plane, heard, failed = KVPlane(1000), asyncio.Event(), asyncio.Event()
    hub = plane.hub(lambda *_: heard.set(), lambda _: None)
    endpoint = hub.bind("tcp://127.0.0.1:0")
    async with way_to(endpoint) as (way, _):
        detail = PeerDetail(rank=0, epoch=1, kv_endpoint=endpoint)
        peer = DecodePeer(detail, b"prefill-0-1", plane, Traffic(), 0.0, lambda *_: way)
        peer.receivers[1] = cast(Any, SimpleNamespace(fail=lambda _: failed.set()))
        peer.tell(KvCache(1, 0, 0))
        await heard_of(heard)
        way.open(1, first := way.token)
        await hub.close()
        await heard_of(failed)
        assert way.token != first
        await peer.close()
    await plane.close()


async def test_the_largest_segment_takes_the_way_with_its_tag() -> None:
    async with way_to("tcp://127.0.0.1:5600") as (way, ends), entrance() as (door, heard):
        door.expect(b"prefill-0-1", way.token)
        way.open(door.port, way.token)
        await heard_of(ends.up)
        way.send(KvCache(1, 1, 1), bytes(48), bytes(MAX_SEALED_BYTES))
        assert (await asyncio.wait_for(heard.get(), WAIT_S))[1] == KvCache(1, 1, 1)


async def test_a_way_that_never_opens_is_said_once() -> None:
    async with way_to("tcp://127.0.0.1:5600") as (way, ends):
        with capture_logs() as logs:
            way.tick(ends.now)
            way.open(1, way.token)  # where nobody listens
            way.tick(ends.now)
            assert not logs
            way.tick(ends.now + PATIENCE_S)
            way.tick(ends.now + 2 * PATIENCE_S)
        assert [line["event"].partition(",")[0] for line in logs] == ["no connection for sealed KV"]


async def test_an_endpoint_that_makes_no_sense_is_no_way() -> None:
    async with way_to("tcp://no host at all:5600") as (way, _):
        with capture_logs() as logs:
            way.open(5601, way.token)
        assert not way.is_up and logs[0]["event"] == "cannot connect for sealed KV"


async def test_kv_goes_through_curve_while_there_is_no_other_way(keys: Path) -> None:
    """The decode worker says a port where nobody answers."""
    async with (
        scripted_router(Keys(keys, "router")) as router,
        ScriptedDecode(keys=Keys(keys, "decode-0")) as decode,
        running(router, "prefill", keys=keys, kv_shared_memory="off"),
    ):
        router.announce(decode.endpoint)
        router.prefill(1, PROMPT, OPTIONS)
        offer = await decode.offered(1)
        assert offer.key and offer.token and offer.key.hex() not in repr(offer)
        decode.ack(1, 0, TOTAL, sealed_port=1)
        received = 0
        while received < TOTAL:
            received += (await decode.segment(1)).num_bytes
        decode.ack(1, TOTAL, TOTAL, ready=True, sealed_port=1)
        await router.receive(Tag.PREFILL_DONE)
        router.prefill(2, PROMPT, OPTIONS)
        other = await decode.offered(2)
        assert other.key != offer.key and other.token == offer.token
        decode.send(Error(2, 1))
        await router.until_free(Role.PREFILL)


async def test_a_plane_without_keys_seals_nothing() -> None:
    plane = KVPlane(1000)
    assert plane.sealed is None
    await plane.close()


async def test_the_entrance_drops_what_is_no_sealed_segment() -> None:
    async with way_to("tcp://127.0.0.1:5600") as (way, _), entrance() as (door, heard):
        door.expect(b"prefill-0-1", way.token)
        way.open(door.port, way.token)
        way.send(KvCache(1, 0, 0))
        way.send(KvCache(1, 1, 1), b"descriptor", b"sealed")
        assert (await asyncio.wait_for(heard.get(), WAIT_S))[1] == KvCache(1, 1, 1)
        assert heard.empty() and dict(door.traffic.received) == {Tag.KV_CACHE: 2}
