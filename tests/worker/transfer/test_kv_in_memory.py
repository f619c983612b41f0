"""KV that stays in memory, between a real worker and a peer that may do anything with it."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.kv import whole
from tests.worker.scripted import (
    PATIENCE_S,
    ScriptedPrefill,
    ScriptedRouter,
    running,
    running_prefill,
    scripted_router,
)
from tests.worker.transfer.mapped import num_mappings
from wire.aio.unix import DescriptorPort, fetch_descriptor
from wire.errors import ErrorCode
from wire.frames import Cancel, Error, KvCache, PrefillDone, Role, Tag
from wire.options import Options
from wire.transfer import SegmentDescriptor, pack_places, segment_digest
from wire.transfer.segment import unpack_places
from worker.compute.shared_memory import SharedMemory, map_memory
from worker.executor.hash import LAYOUT, create

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such memory")
BLOCK = 16 * LAYOUT.token_bytes
PROMPT = [(5 * i) % 1000 for i in range(4 * 16)]
TOTAL = len(PROMPT) * LAYOUT.token_bytes
OPTIONS = Options(max_tokens=20, ignore_eos=True)
NAME = b"prefill-0-1"


class LendingPrefill(ScriptedPrefill):
    """A prefill worker of the test's with memory of 6 blocks that it lends."""

    def __init__(self, router: ScriptedRouter, greeting: bytes = NAME) -> None:
        super().__init__(router, NAME)
        self.memory = SharedMemory(6 * BLOCK)
        self.memory.bytes[:] = list(bytes(range(256)) * (6 * BLOCK // 256))
        self.port = DescriptorPort(self.memory.descriptor, greeting)
        self.lent = self.port.name

    async def close(self) -> None:
        self.port.close()
        await super().close()

    async def offer_memory(self, request_id: int = 1) -> int:
        """Offer it; return whether the worker reads it."""
        self.offer(request_id, PROMPT, memory=self.lent)
        ack, credit = await self.ack()
        assert (ack.request_id, ack.kv_bytes, credit.credit) == (request_id, 0, TOTAL)
        return credit.in_memory

    def place(
        self,
        places: Sequence[int],
        number: int = 1,
        num_segments: int = 1,
        tokens: range = range(64),
        *,
        digest: int | None = None,
    ) -> None:
        """Say that the KV of these tokens lies at these places."""
        size = len(tokens) * LAYOUT.token_bytes
        if digest is None:
            length = size // len(places)
            memory = self.memory.bytes
            kv = b"".join(memory[place : place + length].tobytes() for place in places)
            digest = segment_digest(1, kv)
        rectangle = whole(LAYOUT, tokens.start, len(tokens))
        descriptor = SegmentDescriptor.of(rectangle, size, digest, in_memory=1)
        self.send(KvCache(1, number, num_segments), descriptor.pack(), pack_places(places))


@asynccontextmanager
async def lending(**settings: Any) -> AsyncIterator[tuple[ScriptedRouter, LendingPrefill]]:
    greeting = settings.pop("greeting", NAME)
    async with (
        scripted_router() as router,
        running(router, "decode", **settings),
        LendingPrefill(router, greeting) as prefill,
    ):
        yield router, prefill


@pytest.mark.parametrize(
    ("settings", "credit"),
    [
        ({}, 6 << 20),  # an eighth of all that may be in flight
        ({"credit_bytes": 7 << 20}, 7 << 20),
        ({"kv_shared_memory": "off"}, 4 << 20),
    ],
)
async def test_kv_in_memory_has_a_larger_credit(settings: dict[str, Any], credit: int) -> None:
    limits = {"credit_bytes": 4 << 20, "max_kv_inflight_bytes": 48 << 20, "num_blocks": 8000}
    executor = create(max_model_len=200_000)
    async with lending(executor=executor, **limits | settings) as (router, prefill):
        prefill.offer(1, PROMPT * 1875, memory=prefill.lent)  # 7.3 MiB
        assert (await prefill.ack())[1].credit == credit
        prefill.cancel(1)
        await router.until_free(Role.DECODE)


async def test_memory_of_a_lost_peer_is_unmapped() -> None:
    async with lending() as (router, prefill):
        num_mapped = num_mappings()
        assert await prefill.offer_memory() == 1
        prefill.place([0, BLOCK, 0, BLOCK])
        assert (await prefill.ack())[1].ready and num_mappings() == num_mapped + 1
        await prefill.close()
        async with asyncio.timeout(PATIENCE_S):
            while num_mappings() != num_mapped:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)


@pytest.mark.parametrize("block_size", [16, 8, 12])
async def test_kv_in_memory_is_copied_and_acknowledged(block_size: int) -> None:
    async with lending(block_size=block_size) as (router, prefill):
        assert await prefill.offer_memory() == 1
        prefill.place([3 * BLOCK, BLOCK], 1, 3, range(32))
        prefill.place([0], 2, 3, range(32, 48))
        for kv_bytes in (2 * BLOCK, 3 * BLOCK):
            assert (await prefill.ack())[0].kv_bytes == kv_bytes
        prefill.segment(1, range(48, 64), 3, 3)  # bytes are as good
        ack, credit = await prefill.ack()
        assert (ack.kv_bytes, credit.ready, credit.in_memory) == (TOTAL, 1, 1)
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)


@pytest.mark.parametrize(
    ("places", "tokens"),
    [
        ([5 * BLOCK, 6 * BLOCK], range(32)),
        ([3 * BLOCK], range(64)),  # begins within, and ends outside
        ([5 * BLOCK + 1], range(16)),
        ([2**64 - 1], range(16)),
        ([0, 0, 0], range(64)),  # 64 tokens are not three equal pieces
    ],
)
async def test_places_outside_the_memory_end_the_transfer(places: list[int], tokens: range) -> None:
    async with lending() as (router, prefill):
        assert await prefill.offer_memory() == 1
        prefill.place(places, 1, 2, tokens, digest=1)
        assert await prefill.error() == (1, ErrorCode.PROTOCOL)
        await router.until_free(Role.DECODE)


async def test_changed_memory_fails_closed() -> None:
    async with lending() as (router, prefill):
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        assert await prefill.offer_memory() == 1
        prefill.place([0, BLOCK], 1, 2, range(32))
        await prefill.ack()
        digest = segment_digest(1, prefill.memory.bytes[2 * BLOCK : 4 * BLOCK].tobytes())
        prefill.memory.bytes[3 * BLOCK] ^= 1
        prefill.place([2 * BLOCK, 3 * BLOCK], 2, 2, range(32, 64), digest=digest)
        assert await prefill.error() == (1, ErrorCode.TRANSFER_FAILED)
        assert (await router.receive(Tag.ERROR)).frame == Error(1, ErrorCode.TRANSFER_FAILED)
        await router.until_free(Role.DECODE)


async def test_places_without_agreed_memory_are_refused() -> None:
    async with lending(kv_shared_memory="off") as (router, prefill):
        assert await prefill.offer_memory() == 0
        prefill.place([0], 1, 4, range(16))
        assert await prefill.error() == (1, ErrorCode.PROTOCOL)
        await router.until_free(Role.DECODE)


async def test_memory_of_another_worker_is_not_mapped() -> None:
    async with lending(greeting=b"prefill-1-1") as (router, prefill):
        assert await prefill.offer_memory() == 0
        prefill.cancel(1)
        await router.until_free(Role.DECODE)


async def test_unsealed_memory_is_not_mapped() -> None:
    async with lending() as (router, prefill):
        prefill.port.close()
        unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, 6 * BLOCK)
        prefill.port = DescriptorPort(unsealed, NAME)
        prefill.lent = prefill.port.name
        assert await prefill.offer_memory() == 0
        prefill.cancel(1)
        await router.until_free(Role.DECODE)
        os.close(unsealed)


async def test_an_offer_cancelled_while_memory_is_mapped_leaves_nothing() -> None:
    async with lending() as (router, prefill):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + (name := f"baton-{secrets.token_hex(16)}"))
            listener.listen()
            prefill.offer(1, PROMPT, memory=name)
            prefill.cancel(1)
            prefill.offer(2, PROMPT, memory=name)
            prefill.offer(3, PROMPT)
            ack, _ = await prefill.ack()
            assert ack.request_id == 3, "all before it has come, and waits for the memory"
            prefill.cancel(3)
            connection, _ = listener.accept()
            with connection:
                socket.send_fds(connection, [NAME], [prefill.memory.descriptor])
                ack, credit = await prefill.ack()
        assert (ack.request_id, credit.in_memory) == (2, 1)
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


# The other way round: a real prefill worker.


async def test_whole_blocks_stay_in_memory_and_the_rest_is_sent() -> None:
    prompt = [*PROMPT, 1, 2, 3]
    total = len(prompt) * LAYOUT.token_bytes
    async with running_prefill() as (router, decode):
        router.prefill(1, prompt, OPTIONS)
        offer = await decode.offered(1)
        assert offer.memory is not None
        descriptor, _ = await fetch_descriptor(offer.memory, router.peers[Role.PREFILL])
        memory = map_memory(descriptor)
        os.close(descriptor)
        decode.ack(1, 0, total, in_memory=True)
        num_bytes, kinds = 0, []
        while num_bytes < total:
            message = await decode.receive_past_keepalives()
            segment, second = SegmentDescriptor.unpack(message.payload[0]), message.payload[1]
            kv = bytes(second)
            if segment.in_memory:
                places = unpack_places(second)
                kv = b"".join(memory[place : place + BLOCK].tobytes() for place in places)
            assert segment.digest == segment_digest(1, kv)
            num_bytes += len(kv)
            kinds.append((segment.in_memory, segment.num_tokens))
        assert kinds == [(1, 64), (0, 3)]
        decode.ack(1, total, total, ready=True, in_memory=True)
        assert (await router.receive(Tag.PREFILL_DONE)).frame == PrefillDone(1, total)
        await router.until_free(Role.PREFILL)


@pytest.mark.parametrize("setting", ["off", "auto"])
async def test_a_receiver_cannot_change_how_kv_is_read(setting: str) -> None:
    async with running_prefill(kv_shared_memory=setting) as (router, decode):
        router.prefill(1, PROMPT, OPTIONS)
        offer = await decode.offered(1)
        assert (offer.memory is None) == (setting == "off")
        decode.ack(1, 0, BLOCK, in_memory=True)
        if setting == "auto":
            await decode.receive_past_keepalives()
            decode.ack(1, 0, TOTAL)
        while (message := await decode.receive_past_keepalives()).tag is not Tag.CANCEL:
            pass
        assert message.frame == Cancel(1, ErrorCode.PROTOCOL)
        await router.until_free(Role.PREFILL)
