"""Connections for segments, at a real decode worker: who is let in, and what is taken."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.kv import whole
from tests.wire.process.key_files import write
from tests.worker.scripted import (
    GatedExecutor,
    Process,
    ScriptedPrefill,
    ScriptedRouter,
    running,
    scripted_router,
)
from tests.worker.transfer.segments import PEER, WAIT_S, Arrived, Taking, hub_of, segment
from wire.errors import ErrorCode
from wire.frames import Cancel, KvCache, Role, Tag
from wire.options import Options
from wire.parts import Buffer
from wire.payloads import Credit
from wire.process.keys import Keys
from wire.stream import encode
from wire.transfer import (
    GREETING,
    MAX_SEALED_BYTES,
    Sealing,
    SegmentDescriptor,
    new_key,
    new_token,
    segment_digest,
    segment_head,
)
from worker.executor.hash import LAYOUT
from worker.transfer.segment_hub import SegmentHub

PROMPT = [(11 * i) % 1000 for i in range(300)]
TOTAL = len(PROMPT) * LAYOUT.token_bytes
OPTIONS = Options(max_tokens=4, ignore_eos=True)
PARTIES = ("router", "prefill-0", "prefill-1", "decode-0")


def prompt_of(request_id: int) -> list[int]:
    """One of its own: equal ones wait for each other."""
    return [request_id, *PROMPT[1:]]


class BesidePrefill(ScriptedPrefill):
    """A prefill worker that offers a token, with keys a key too, and sends to the segment port."""

    def __init__(
        self, router: ScriptedRouter, keys: Path | None, rank: int = 0, epoch: int = 1
    ) -> None:
        self.key, self.token, self.port = new_key() if keys else None, new_token(), 0
        self._way: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        security: dict[str, Any] = {}
        if keys is not None:
            security = {"keys": Keys(keys, f"prefill-{rank}"), "server": "decode-0"}
        super().__init__(router, b"prefill-%d-%d" % (rank, epoch), **security)

    async def close(self) -> None:
        await self.hang_up()
        await super().close()

    async def hang_up(self) -> None:
        if self._way is not None:
            self._way[1].close()
            with suppress(ConnectionError):
                await self._way[1].wait_closed()
        self._way = None

    async def accepted(self, request_id: int, **changes: Any) -> int:
        """Offer and be granted credit; return the port for segments."""
        self.offer(request_id, prompt_of(request_id), key=self.key, token=self.token, **changes)
        _, credit = await self.ack()
        self.port = credit.segment_port
        return self.port

    def reset(self) -> None:
        """End the connection by a reset, as the system does of a process that was killed."""
        assert self._way is not None
        connected = self._way[1].get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._way[1].transport.abort()
        self._way = None

    async def is_admitted(self, greeting: bytes = b"") -> bool:
        """Connect to the port and say the token; whether it is answered, not hung up on."""
        await self.hang_up()
        self._way = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._way
        writer.write(greeting or GREETING + self.token)
        with suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(len(GREETING)), WAIT_S)
            assert answer in (b"", GREETING)
            return bool(answer)
        return False

    async def is_cut(self) -> bool:
        """Wait until the connection ends; whether it said nothing more."""
        assert self._way is not None
        with suppress(ConnectionError):
            return await asyncio.wait_for(self._way[0].read(1), WAIT_S) == b""
        return True

    def put(self, data: bytes) -> None:
        assert self._way is not None
        self._way[1].write(data)

    def segment_of(
        self, request_id: int, tokens: range = range(300), number: int = 1, num_segments: int = 1
    ) -> tuple[KvCache, SegmentDescriptor, bytes]:
        """A segment of zeros, sealed if there is a key."""
        kv = bytes(len(tokens) * LAYOUT.token_bytes)
        descriptor = SegmentDescriptor.of(whole(LAYOUT, tokens.start, len(tokens)), len(kv), 0)
        frame = KvCache(request_id, number, num_segments)
        if self.key is None:
            return frame, descriptor._replace(digest=segment_digest(request_id, kv)), kv
        return frame, descriptor, Sealing(self.key).seal(frame, descriptor, kv)

    def bytes_of(self, *segment: Any) -> bytes:
        """The messages of `segment_of`."""
        frame, descriptor, kv = self.segment_of(*segment)
        return segment_head(frame, descriptor, len(kv)) + kv


Stage = tuple[ScriptedRouter, BesidePrefill, Process]


@pytest.fixture(params=[False, True], ids=["plain", "keys"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    if not request.param:
        return None
    write(tmp_path, *PARTIES)
    return tmp_path


@asynccontextmanager
async def stage(keys: Path | None, **settings: Any) -> AsyncIterator[Stage]:
    """A real decode worker between a router and a prefill worker of the test's."""
    async with (
        scripted_router(None if keys is None else Keys(keys, "router")) as router,
        running(router, "decode", keys=keys, **settings) as process,
        BesidePrefill(router, keys) as prefill,
    ):
        yield router, prefill, process


async def test_segments_come_in_any_order_over_either_connection(keys: Path | None) -> None:
    async with stage(keys) as (router, prefill, process):
        assert await prefill.accepted(1)
        assert await prefill.is_admitted()
        prefill.put(prefill.bytes_of(1, range(200, 300), 3, 3))
        assert (await prefill.ack())[0].kv_bytes == 100 * LAYOUT.token_bytes
        prefill.segment(1, range(100, 200), 2, 3)  # over the KV socket
        assert (await prefill.ack())[0].kv_bytes == 200 * LAYOUT.token_bytes
        prefill.put(prefill.bytes_of(1, range(100), 1, 3))
        ack, credit = await prefill.ack()
        assert (ack.kv_bytes, credit.ready, credit.segment_port) == (TOTAL, 1, prefill.port)
        router.decode(1, [*prompt_of(1), 5], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)
        assert dict(process.worker.role.segment_traffic.received) == {Tag.KV_CACHE: 2}


@pytest.mark.parametrize("part", ["descriptor", "kv"])
async def test_a_changed_segment_fails_its_transfer_and_no_other(
    keys: Path | None, part: str
) -> None:
    async with stage(keys) as (router, prefill, _):
        for request_id in (1, 2):
            await prefill.accepted(request_id)
        await prefill.is_admitted()
        frame, descriptor, kv = prefill.segment_of(1)
        if part == "kv":
            kv = kv[:4] + bytes([kv[4] ^ 1]) + kv[5:]
        else:
            descriptor = descriptor._replace(num_tokens=299)
        prefill.put(segment_head(frame, descriptor, len(kv)) + kv)
        request_id, code = await prefill.error()
        assert request_id == 1 and code in (ErrorCode.TRANSFER_FAILED, ErrorCode.PROTOCOL)
        prefill.put(prefill.bytes_of(2))
        assert (await prefill.ack())[1].ready
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


async def test_an_unsealed_segment_is_refused_where_there_are_keys(
    tmp_path: Path,
) -> None:
    write(tmp_path, *PARTIES)
    async with stage(tmp_path) as (router, prefill, _):
        await prefill.accepted(1)
        await prefill.is_admitted()
        prefill.key = None
        prefill.put(prefill.bytes_of(1))
        assert (await prefill.error())[0] == 1
        assert await prefill.accepted(2) == 0, "no key, no port"
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


@pytest.mark.parametrize(
    "what",
    [encode(KvCache(1, 0, 0), bytes(96)), encode(KvCache(1, 1, 1), bytes(49 + MAX_SEALED_BYTES))],
    ids=["a keepalive", "too long"],
)
async def test_other_frames_close_the_connection(what: list[bytes]) -> None:
    async with stage(None) as (router, prefill, _):
        await prefill.accepted(1)
        assert await prefill.is_admitted()
        prefill.put(b"".join(what))
        assert await prefill.is_cut()
        assert prefill.is_quiet
        prefill.segment(1, range(300))
        assert (await prefill.ack())[1].ready, "over the KV socket it goes on"
        prefill.cancel(1)
        await router.until_free(Role.DECODE)


async def test_a_peer_does_not_send_for_another() -> None:
    async with stage(None) as (router, prefill, _), BesidePrefill(router, None, 1) as other:
        await prefill.accepted(1)
        await other.accepted(2)
        assert await prefill.is_admitted() and await other.is_admitted()
        other.key = prefill.key
        other.put(other.bytes_of(1))  # even with the right key
        other.put(other.bytes_of(3))
        prefill.put(prefill.bytes_of(1, range(100), 1, 2))
        assert (await prefill.ack())[0].kv_bytes == 100 * LAYOUT.token_bytes
        prefill.put(prefill.bytes_of(1, range(100, 300), 2, 2))
        assert (await prefill.ack())[1].ready
        assert other.is_quiet
        prefill.cancel(1)
        other.cancel(2)
        await router.until_free(Role.DECODE)


@pytest.mark.parametrize("greeting", [GREETING + bytes(32), b"GET /" * 8])
async def test_an_unknown_token_is_not_admitted(keys: Path | None, greeting: bytes) -> None:
    async with stage(keys) as (router, prefill, process):
        await prefill.accepted(1)
        assert not await prefill.is_admitted(greeting)
        assert not process.worker.role.segment_traffic.received
        assert await prefill.is_admitted()
        prefill.put(prefill.bytes_of(1))
        assert (await prefill.ack())[1].ready
        prefill.cancel(1)
        await router.until_free(Role.DECODE)


async def test_a_token_admits_once_and_a_new_one_closes_the_connection() -> None:
    async with stage(None) as (router, prefill, _), BesidePrefill(router, None, 1) as listener:
        await prefill.accepted(1)
        assert await prefill.is_admitted()
        listener.port, listener.token = prefill.port, prefill.token
        assert not await listener.is_admitted(), "it was read on the way"
        prefill.token = new_token()
        await prefill.accepted(2)
        assert await prefill.is_cut()
        assert await prefill.is_admitted()
        prefill.put(prefill.bytes_of(2))
        assert (await prefill.ack())[1].ready
        prefill.cancel(1)
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


async def test_the_end_of_the_kv_connection_ends_the_other() -> None:
    async with stage(None) as (router, prefill, _):
        await prefill.accepted(1)
        assert await prefill.is_admitted()
        prefill.put(prefill.bytes_of(1, range(100), 1, 2))
        await prefill.ack()
        prefill.put(prefill.bytes_of(1, range(100, 300), 2, 2)[:-1])  # its end never comes
        await ScriptedPrefill.close(prefill)
        assert await prefill.is_cut()
        await router.until_free(Role.DECODE)


async def test_an_incomplete_segment_keeps_no_blocks() -> None:
    """Its transfer ends, others of its peer wait behind it, and the connection goes on."""
    async with stage(None) as (router, prefill, _):
        await prefill.accepted(1)
        assert await prefill.is_admitted()
        data = prefill.bytes_of(1)
        prefill.put(data[:1000])
        prefill.cancel(1)
        await router.until_free(Role.DECODE)
        await prefill.accepted(2)
        prefill.put(data[1000:] + prefill.bytes_of(2))
        assert (await prefill.ack())[1].ready
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


async def test_blocks_are_not_freed_while_a_segment_is_stored() -> None:
    executor = GatedExecutor()
    async with stage(None, executor=executor, num_blocks=20) as (router, prefill, _):
        executor.cache.gate.clear()
        await prefill.accepted(1)
        assert await prefill.is_admitted()
        prefill.put(prefill.bytes_of(1))
        await executor.cache.until_reached()
        router.send(Role.DECODE, Cancel(1, ErrorCode.CANCELLED))
        assert await prefill.error() == (1, ErrorCode.CANCELLED)
        prefill.offer(2, prompt_of(2), key=prefill.key, token=prefill.token)  # the same blocks
        router.loads.clear()
        await router.until_joined(Role.DECODE)
        prefill.send(KvCache(2, 0, 0))
        assert (await prefill.ack())[1] == Credit(0, 0, 0), "it waits for them"
        executor.cache.gate.set()
        assert (await prefill.ack())[1].credit == TOTAL
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


async def test_a_reset_inside_a_segment_ends_its_transfer() -> None:
    """Not a lease later: its blocks do not wait for the rest."""
    async with stage(None) as (router, prefill, _):
        await prefill.accepted(1)
        assert await prefill.is_admitted()
        prefill.put(prefill.bytes_of(1, range(100), 1, 2))
        await prefill.ack()
        prefill.put(prefill.bytes_of(1, range(100, 300), 2, 2)[:1000])
        prefill.reset()
        assert await prefill.error() == (1, ErrorCode.WORKER_LOST)
        await router.until_free(Role.DECODE)


@pytest.mark.parametrize("settings", [{"kv_segment_port": "off"}, {"kv_bind": "ipc"}])
async def test_without_a_segment_port_kv_uses_the_kv_socket(
    settings: dict[str, str], tmp_path: Path
) -> None:
    if settings.get("kv_bind"):
        settings = {"kv_bind": f"ipc://{tmp_path}/kv"}
    async with stage(None, **settings) as (_, prefill, _):
        assert await prefill.accepted(1) == 0
        prefill.segment(1, range(300))
        assert (await prefill.ack())[1].ready


# The hub alone.


class Guest:
    """Somebody who connects and greets."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def hear(self, num_bytes: int) -> bytes:
        """The reply; b"" if the connection was closed."""
        with suppress(ConnectionError):
            return await asyncio.wait_for(self._reader.read(num_bytes), WAIT_S)
        return b""

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def guest(hub: SegmentHub[Any], greeting: bytes, *, is_welcome: bool) -> AsyncIterator[Guest]:
    one = Guest(*await asyncio.open_connection("127.0.0.1", hub.port))
    one.say(greeting)
    try:
        assert await one.hear(len(GREETING)) == (GREETING if is_welcome else b"")
        yield one
    finally:
        await one.close()


async def turned_away(hub: SegmentHub[Any], greeting: bytes) -> None:
    async with guest(hub, greeting, is_welcome=False):
        pass


async def test_a_repeated_token_neither_closes_nor_admits() -> None:
    taking, token = Taking(), new_token()
    async with hub_of(taking) as hub:
        hub.expect(PEER, token)
        async with guest(hub, GREETING + token, is_welcome=True) as one:
            hub.expect(PEER, token)  # by the next offer
            await turned_away(hub, GREETING + token)
            one.say(segment(1, b"still"))
            assert await taking.next() == (1, b"still", None)


async def test_an_incomplete_greeting_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.transfer.segment_hub.GREETING_S", 0.05)
    token = new_token()
    async with hub_of(Taking()) as hub:
        hub.expect(PEER, token)
        await turned_away(hub, GREETING + token[:-1])


async def test_the_last_segment_that_has_arrived_is_marked() -> None:
    taking, token = Taking(), new_token()
    async with hub_of(taking) as hub:
        hub.expect(PEER, token)
        async with guest(hub, GREETING + token, is_welcome=True) as one:
            one.say(segment(1, b"hello") + segment(2, b"there"))
            assert [(await taking.next())[0] for _ in range(2)] == [1, 2]
            assert taking.lasts == [2]


async def test_a_segment_whose_admission_raises_is_dropped() -> None:
    class Breaking(Taking):
        def admit(
            self, peer: bytes, frame: KvCache, descriptor: Buffer, kv: Buffer
        ) -> Arrived | None:
            if frame.segment == 1:
                raise RuntimeError("broken")
            return super().admit(peer, frame, descriptor, kv)

    taking, token = Breaking(), new_token()
    async with hub_of(taking) as hub:
        hub.expect(PEER, token)
        async with guest(hub, GREETING + token, is_welcome=True) as one:
            one.say(segment(1, b"hello") + segment(2, b"there"))
            assert await taking.next() == (2, b"there", None)


async def test_an_old_connection_that_ends_late_does_not_hide_the_new_one() -> None:
    class Slow(Taking):
        def __init__(self) -> None:
            super().__init__()
            self.thread, self.gate = asyncio.Queue[threading.Thread](), threading.Event()
            self._loop = asyncio.get_running_loop()

        def store(self, arrival: Arrived) -> Exception | None:
            self._loop.call_soon_threadsafe(self.thread.put_nowait, threading.current_thread())
            assert self.gate.wait(WAIT_S)
            return super().store(arrival)

    taking, first, second = Slow(), new_token(), new_token()
    async with hub_of(taking) as hub:
        hub.expect(PEER, first)
        async with guest(hub, GREETING + first, is_welcome=True) as old:
            old.say(segment(1, b"hello"))
            thread = await asyncio.wait_for(taking.thread.get(), WAIT_S)
            hub.expect(PEER, second)
            async with guest(hub, GREETING + second, is_welcome=True) as new:
                taking.gate.set()
                await asyncio.to_thread(thread.join, WAIT_S)
                new.say(segment(2, b"there"))
                assert [(await taking.next())[0] for _ in range(2)] == [1, 2]
                hub.forget(PEER)
                assert await new.hear(1) == b"", "it is cut"
