"""Transfers against a decode worker played by the test: credit, leases, every way to end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from tests.worker.scripted import (
    PATIENCE_S,
    Clock,
    GatedExecutor,
    ScriptedDecode,
    ScriptedRouter,
    running,
    running_prefill,
    scripted_router,
)
from wire.aio.zmq import Sending
from wire.errors import ErrorCode
from wire.frames import (
    Cancel,
    DecodeRequest,
    Error,
    Heartbeat,
    KvCache,
    KvCacheAck,
    PrefillDone,
    Role,
    Tag,
)
from wire.options import Options
from wire.payloads import Credit, ErrorDetail, Offer, PeerDetail, decode_map, encode_map
from wire.transfer import (
    KVSender,
    Rectangle,
    SegmentDescriptor,
    TransferState,
    new_key,
    new_token,
    segment_digest,
    unasked_segments,
)
from worker.executor.hash import LAYOUT, HashKVCache
from worker.roles.prefill import PrefillRole
from worker.transfer.sender import OutgoingTransfer
from worker.transfer.thread import Copies

TOKEN_BYTES = LAYOUT.token_bytes
PROMPT = [(7 * i) % 1000 for i in range(288)]
TOTAL = len(PROMPT) * TOKEN_BYTES
STEP = 96 * TOKEN_BYTES  # whole blocks
OPTIONS = Options(max_tokens=20, ignore_eos=True)


async def failed(router: ScriptedRouter, request_id: int, code: ErrorCode) -> ErrorDetail:
    """The ERROR of a request, whether or not its first token came before."""
    while (message := await router.receive_any()).tag is Tag.PREFILL_DONE:
        pass
    assert message.frame == Error(request_id, code)
    return decode_map(ErrorDetail, message.body())


async def kept_waiting(decode: ScriptedDecode, request_id: int) -> None:
    """Answer an offer that it waits for blocks, and see that this was heard."""
    decode.ack(request_id, 0, 0)
    decode.send(Heartbeat(0, 0, 0))  # not of this plane: refused
    assert (await decode.receive()).frame == Error(0, ErrorCode.PROTOCOL)


async def receive_all(decode: ScriptedDecode, request_id: int) -> None:
    """Take a whole prompt in, in one grant."""
    decode.ack(request_id, 0, TOTAL)
    num_bytes = 0
    while num_bytes < TOTAL:
        num_bytes += (await decode.segment(request_id)).num_bytes
    decode.ack(request_id, TOTAL, TOTAL, ready=True)


async def test_no_more_is_sent_than_was_granted() -> None:
    async with running_prefill() as (router, decode):
        router.prefill(1, PROMPT, structs.replace(OPTIONS, cache_salt="a"))
        offer = await decode.offered(1)
        assert (offer.num_tokens, offer.total_bytes) == (288, TOTAL)
        assert offer.cache_salt == "a" and "cache_salt" not in repr(offer)
        assert (await router.receive(Tag.PREFILL_DONE)).frame == PrefillDone(1, TOTAL)
        for number in range(3):
            decode.ack(1, number * STEP, (number + 1) * STEP)
            descriptor = await decode.segment(1)
            assert (descriptor.token_start, descriptor.num_tokens) == (96 * number, 96)
            assert descriptor.num_layers == LAYOUT.kv_groups[0].num_layers
            # A refused frame and back: the worker had time to send more, had it wished to.
            router.send(Role.PREFILL, DecodeRequest(9, 1))
            assert (await router.receive(Tag.ERROR)).frame == Error(9, ErrorCode.PROTOCOL)
            assert decode.is_quiet
        decode.ack(1, TOTAL, TOTAL, ready=True)
        await router.until_free(Role.PREFILL)


@asynccontextmanager
async def connected_stage() -> AsyncIterator[tuple[ScriptedRouter, ScriptedDecode]]:
    """As `running_prefill`, but connected; the decode worker takes the whole prompt unasked."""
    async with (
        scripted_router() as router,
        ScriptedDecode() as decode,
        running(router, "prefill", prefix_cache=False) as process,
    ):
        router.announce(decode.endpoint)
        router.prefill(9, PROMPT, OPTIONS)
        await decode.offered(9)
        decode.send(Error(9, ErrorCode.OUT_OF_BLOCKS))
        await failed(router, 9, ErrorCode.OUT_OF_BLOCKS)
        await router.until_free(Role.PREFILL)
        assert isinstance(process.worker.role, PrefillRole)
        process.worker.role.first_chunk_s = inf  # the next prompt is offered when it is computed
        router.announce(decode.endpoint, TOTAL)
        yield router, decode


async def offered_with_kv(decode: ScriptedDecode, request_id: int) -> int:
    """Return the bytes of KV that come with the next offer."""
    message = await decode.receive()
    frame = message.frame
    assert isinstance(frame, KvCache) and (frame.request_id, frame.segment) == (request_id, 0)
    assert decode_map(Offer, message.payload[0]).num_tokens == len(PROMPT)
    segments = unasked_segments(frame, message.payload, TOTAL)
    for part, kv in segments:
        assert SegmentDescriptor.unpack(part).digest == segment_digest(request_id, kv)
    return sum(len(kv) for _, kv in segments)


async def test_kv_that_the_receiver_dropped_from_an_offer_is_sent_again() -> None:
    async with connected_stage() as (router, decode):
        router.prefill(1, PROMPT, OPTIONS)
        assert await offered_with_kv(decode, 1) == TOTAL
        await receive_all(decode, 1)
        await router.until_free(Role.PREFILL)


@pytest.mark.parametrize("settings", [{"max_ubatch_tokens": 64, "step_delay_s": 0.01}, {}])
async def test_kv_that_is_too_large_or_incomplete_is_not_in_the_offer(
    settings: dict[str, Any],
) -> None:
    async with running_prefill(**settings) as (router, decode):
        router.announce(decode.endpoint, TOTAL if settings else TOTAL - 1)
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        await receive_all(decode, 1)
        await router.until_free(Role.PREFILL)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (ErrorCode.OUT_OF_BLOCKS, ErrorCode.OUT_OF_BLOCKS),
        (ErrorCode.PROTOCOL, ErrorCode.TRANSFER_FAILED),  # no fault of the client
        (ErrorCode.UNKNOWN_REQUEST, ErrorCode.TRANSFER_FAILED),
        (ErrorCode.CANCELLED, ErrorCode.TRANSFER_FAILED),  # by the loss of its router
    ],
)
async def test_a_refusal_ends_the_request(code: ErrorCode, told: ErrorCode) -> None:
    async with running_prefill() as (router, decode):
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        decode.send(Error(1, code), encode_map(ErrorDetail(message="no")))
        detail = await failed(router, 1, told)
        assert (detail.stage, detail.worker) == ("transfer", "prefill-0")
        await router.until_free(Role.PREFILL)
        assert decode.is_quiet  # who refused needs no CANCEL


async def test_a_peer_that_was_mute_is_connected_to_anew() -> None:
    clock = Clock()
    async with running_prefill(lease_s=30.0, clock=clock) as (router, decode):
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        clock.now += 30
        await failed(router, 1, ErrorCode.TRANSFER_FAILED)
        await asyncio.wait_for(decode.is_left.wait(), PATIENCE_S)
        router.prefill(2, PROMPT, OPTIONS)
        while (message := await decode.receive_past_keepalives()).tag is Tag.CANCEL:
            pass
        assert message.frame == KvCache(2, 0, 0)
        await receive_all(decode, 2)
        await router.until_free(Role.PREFILL)


async def test_the_lease_begins_with_the_offer_not_with_the_wait_for_blocks() -> None:
    clock = Clock()
    settings = {"lease_s": 30.0, "clock": clock, "num_blocks": 20, "prefix_cache": False}
    async with running_prefill(**settings) as (router, decode):
        router.prefill(1, PROMPT, OPTIONS)
        router.prefill(2, PROMPT, OPTIONS)  # no blocks before the first is gone
        await decode.offered(1)
        for _ in range(4):
            clock.now += 10
            assert (await decode.receive()).frame == KvCache(1, 0, 0)
            await kept_waiting(decode, 1)
        await receive_all(decode, 1)
        await decode.offered(2)
        clock.now += 10
        assert (await decode.receive()).frame == KvCache(2, 0, 0)  # no CANCEL: it has time
        await receive_all(decode, 2)
        for request_id in (1, 2):
            assert (await router.receive(Tag.PREFILL_DONE)).frame == PrefillDone(request_id, TOTAL)
        await router.until_free(Role.PREFILL)


async def test_cancel_before_the_offer_tells_the_decode_worker_nothing() -> None:
    async with running_prefill(num_blocks=20, prefix_cache=False) as (router, decode):
        router.prefill(1, PROMPT, OPTIONS)
        router.prefill(2, PROMPT, OPTIONS)
        await decode.offered(1)
        for request_id in (2, 1):
            router.send(Role.PREFILL, Cancel(request_id, ErrorCode.CANCELLED))
        assert (await decode.receive()).frame == Cancel(1, ErrorCode.CANCELLED)
        await router.until_free(Role.PREFILL)
        assert decode.is_quiet


@pytest.mark.parametrize("state", ["offered", "sent"])
async def test_cancel_frees_both_sides(state: str) -> None:
    async with running_prefill() as (router, decode):
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        await router.receive(Tag.PREFILL_DONE)
        if state != "offered":
            decode.ack(1, 0, STEP)
            await decode.segment(1)
        if state == "sent":
            decode.ack(1, STEP, TOTAL)
            await decode.segment(1)
            await decode.segment(1)
        router.send(Role.PREFILL, Cancel(1, ErrorCode.CANCELLED))
        assert (await decode.receive()).frame == Cancel(1, ErrorCode.CANCELLED)
        await router.until_free(Role.PREFILL)
        decode.ack(1, STEP, TOTAL)  # late, of no effect
        await router.until_free(Role.PREFILL)
        assert decode.is_quiet and router.is_quiet


@pytest.mark.parametrize(
    ("kv_bytes", "credit"),
    [
        (STEP + 1, Credit(TOTAL, 0, 0).pack()),  # more than was sent
        (STEP, Credit(TOTAL, 0, 1).pack()),  # ready before the end
        (STEP, Credit(TOTAL, 16, 0).pack()),  # cached_tokens changed
        (STEP, b"\0" * 8),
    ],
)
async def test_a_false_ack_ends_the_transfer(kv_bytes: int, credit: bytes) -> None:
    async with running_prefill() as (router, decode):
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        decode.ack(1, 0, STEP)
        await decode.segment(1)
        decode.send(KvCacheAck(1, kv_bytes), credit)
        await failed(router, 1, ErrorCode.TRANSFER_FAILED)
        assert (await decode.receive()).frame == Cancel(1, ErrorCode.PROTOCOL)
        await router.until_free(Role.PREFILL)


async def test_blocks_are_not_reused_while_they_are_read() -> None:
    executor = GatedExecutor()
    settings = {"executor": executor, "num_blocks": 20, "prefix_cache": False}
    async with running_prefill(**settings) as (router, decode):
        executor.cache.gate.clear()
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        decode.ack(1, 0, TOTAL)
        await executor.cache.until_reached()  # a pack is under way
        await router.receive(Tag.PREFILL_DONE)
        router.send(Role.PREFILL, Cancel(1, ErrorCode.CANCELLED))
        assert (await decode.receive()).frame == Cancel(1, ErrorCode.CANCELLED)
        router.prefill(1, PROMPT, OPTIONS)  # an id that is not free yet either
        router.prefill(2, PROMPT[::-1], OPTIONS)  # into the very same blocks
        assert (await router.load(Role.PREFILL)).used == 18
        assert router.is_quiet and decode.is_quiet
        executor.cache.gate.set()
        await decode.offered(2)
        await router.receive(Tag.PREFILL_DONE)
        await receive_all(decode, 2)  # would not take a segment of 1
        await router.until_free(Role.PREFILL)
        assert decode.is_quiet


async def test_a_failed_copy_ends_the_request_on_both_sides() -> None:
    executor = GatedExecutor()
    async with running_prefill(executor=executor) as (router, decode):
        executor.cache.problem = RuntimeError("no device")
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        decode.ack(1, 0, TOTAL)
        assert (await decode.receive()).frame == Cancel(1, ErrorCode.INTERNAL)
        await failed(router, 1, ErrorCode.INTERNAL)
        await router.until_free(Role.PREFILL)


class HoldingPeer:
    """A peer whose socket releases no buffer by itself; `told` has what may get lost."""

    name = "decode-0"
    num_messages = 0
    is_mute, is_up = False, True

    def __init__(self, num_expected: int = 3, kv_unasked_bytes: int = 0) -> None:
        self.detail = PeerDetail(
            rank=0, epoch=1, kv_endpoint="tcp://127.0.0.1:1", kv_unasked_bytes=kv_unasked_bytes
        )
        self.segments: Any = None
        self.receivers: dict[int, object] = {}
        self.sendings: list[Sending] = []
        self.numbers: list[int] = []
        self.told: list[Any] = []
        self.has_all = asyncio.Event()
        self._num_expected = num_expected

    def tell(self, *message: object) -> None:
        self.told.append(message)

    def send(self, frame: KvCache, *payload: object, track: bool) -> Sending:
        assert track
        self.numbers.append(frame.segment)
        self.sendings.append(Sending())
        if len(self.sendings) == self._num_expected:
            self.has_all.set()
        return self.sendings[-1]


class Outgoing:
    """A transfer of the prompt to a `HoldingPeer`, offered with `num_tokens` computed."""

    def __init__(
        self,
        peer: HoldingPeer,
        num_tokens: int = 0,
        cache: HashKVCache | None = None,
        num_at_once: int = 1,
        clock: Callable[[], float] = lambda: 0.0,
        **offer: Any,
    ) -> None:
        self.copies, self.has_ended = Copies(num_at_once), asyncio.Event()

        def make_sender(now: float) -> KVSender:
            limits: dict[str, Any] = {"max_bytes": TOTAL, "lease_s": 30, "now": now}
            return KVSender(1, LAYOUT, PROMPT, **limits, **offer)

        cache, copies, end = cache or HashKVCache(20, 16), self.copies, self.has_ended.set
        self.transfer = OutgoingTransfer(
            *(make_sender, cast(Any, peer), cache, copies, lambda _: end(), clock)
        )
        self.transfer.offer(tuple(range(20)), num_tokens, 0.0)

    def ack(self, kv_bytes: int, credit: int, *, is_ready: bool = False, **more: int) -> None:
        granted = Credit(credit, 0, int(is_ready), **more)
        self.transfer.on_ack(KvCacheAck(1, kv_bytes), granted)

    def run(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.transfer.run())

    async def ended(self) -> TransferState:
        await asyncio.wait_for(self.has_ended.wait(), PATIENCE_S)
        return self.transfer.sender.state


async def test_a_cancelled_offer_is_not_sent() -> None:
    outgoing = Outgoing(peer := HoldingPeer(), len(PROMPT))
    outgoing.transfer.cancel()
    await outgoing.run()
    assert peer.told == [(Cancel(1, ErrorCode.CANCELLED),)]
    outgoing.copies.close()


@pytest.mark.parametrize("num_messages", [0, 1])
async def test_a_peer_is_mute_if_it_answers_no_transfer_for_a_lease(num_messages: int) -> None:
    """Its link is closed for nothing else: all transfers on it would end."""
    peer = HoldingPeer()
    peer.num_messages = 7
    outgoing = Outgoing(peer)
    peer.num_messages += num_messages
    outgoing.transfer.tick(31.0)
    assert outgoing.transfer.sender.state is TransferState.FAILED
    assert peer.is_mute == (num_messages == 0)
    outgoing.copies.close()


@pytest.mark.parametrize("is_in_memory", [False, True])
async def test_kv_in_shared_memory_opens_no_segment_connection(is_in_memory: bool) -> None:
    peer, opened = HoldingPeer(), list[int]()
    peer.segments = SimpleNamespace(open=lambda port, token: opened.append(port))
    outgoing = Outgoing(peer, memory="/memory", key=new_key(), token=new_token())
    outgoing.transfer.sender.offer()
    outgoing.ack(0, TOTAL, in_memory=int(is_in_memory), segment_port=5601)
    assert outgoing.transfer.sender.is_in_memory == is_in_memory
    assert opened == ([] if is_in_memory else [5601])
    outgoing.copies.close()


async def test_an_offer_has_the_token_of_the_moment_when_it_is_sent() -> None:
    """The connection may have ended while the offer waited for blocks."""
    peer, now = HoldingPeer(), new_token()
    peer.segments = SimpleNamespace(token=now, is_up=False)
    outgoing = Outgoing(peer, token=new_token())
    task = outgoing.run()
    await asyncio.sleep(0)
    assert decode_map(Offer, peer.told[0][1]).token == now
    outgoing.transfer.cancel()
    await task
    outgoing.copies.close()


@pytest.mark.parametrize("num_at_once", [1, 3])
async def test_segments_are_packed_in_parallel_and_sent_in_order(num_at_once: int) -> None:
    peer, together = HoldingPeer(), threading.Barrier(num_at_once)

    class Cache(HashKVCache):
        def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
            together.wait(20)  # breaks unless so many are packed at the same moment
            return super().pack(block_table, rectangle)

    outgoing = Outgoing(peer, cache=Cache(20, 16), num_at_once=num_at_once)
    task = outgoing.run()
    for num_tokens in (96, 192, len(PROMPT)):
        outgoing.transfer.advance(num_tokens, 0.0)
    for credit in (STEP, 2 * STEP, TOTAL):
        outgoing.ack(0, credit)
    await peer.has_all.wait()
    outgoing.ack(TOTAL, TOTAL, is_ready=True)
    assert await outgoing.ended() is TransferState.DONE and peer.numbers == [1, 2, 3]
    for sending in peer.sendings:
        assert not task.done(), "its blocks are sent from"
        sending.drop()
    await task
    outgoing.copies.close()


async def test_kv_in_shared_memory_is_read_ahead_of_the_credit_and_not_sent() -> None:
    peer, read, loop = HoldingPeer(), asyncio.Event(), asyncio.get_running_loop()

    class Cache(HashKVCache):
        def view(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview | None:
            if rectangle.tokens.stop == len(PROMPT):
                loop.call_soon_threadsafe(read.set)
            return super().view(block_table, rectangle)

    memory: dict[str, Any] = {"memory": "baton-somewhere", "block_size": 16}
    outgoing = Outgoing(peer, len(PROMPT), Cache(20, 16), **memory)
    task = outgoing.run()
    outgoing.ack(0, STEP, in_memory=1)
    await asyncio.wait_for(read.wait(), 20)
    assert outgoing.transfer.sender.kv_bytes <= STEP
    outgoing.ack(0, TOTAL, in_memory=1)
    await asyncio.wait_for(peer.has_all.wait(), 20)
    assert outgoing.transfer.sender.kv_bytes == TOTAL
    outgoing.ack(TOTAL, TOTAL, is_ready=True, in_memory=1)
    await outgoing.ended()
    for sending in peer.sendings:
        sending.drop()
    await task
    outgoing.copies.close()


async def test_blocks_are_kept_while_a_segment_is_read_though_another_failed() -> None:
    gate, is_reached = threading.Event(), threading.Event()

    class Cache(HashKVCache):
        def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
            if rectangle.tokens.start == 0:
                assert is_reached.wait(20)
                raise RuntimeError("no device")
            is_reached.set()
            assert gate.wait(20)
            return super().pack(block_table, rectangle)

    outgoing = Outgoing(HoldingPeer(), len(PROMPT), Cache(20, 16), num_at_once=2)
    task = outgoing.run()
    for credit in (STEP, 2 * STEP):
        outgoing.ack(0, credit)
    await asyncio.to_thread(is_reached.wait, 20)
    await outgoing.copies.run(int, num_bytes=TOTAL)  # on the thread where the first one failed
    for _ in range(10):
        await asyncio.sleep(0)
    assert not outgoing.has_ended.is_set()
    gate.set()
    assert await outgoing.ended() is TransferState.FAILED
    await task
    outgoing.copies.close()


async def test_blocks_are_kept_until_the_kv_in_an_offer_is_released() -> None:
    outgoing = Outgoing(peer := HoldingPeer(1, TOTAL), len(PROMPT))
    task = outgoing.run()
    await peer.has_all.wait()
    outgoing.ack(TOTAL, TOTAL, is_ready=True)
    assert await outgoing.ended() is TransferState.DONE and not task.done()
    peer.sendings[0].drop()
    await task
    outgoing.copies.close()


async def test_a_cancel_frees_blocks_that_wait_for_a_connection() -> None:
    async with scripted_router() as router, running(router, "prefill"):
        router.announce("tcp://127.0.0.1:9", TOTAL)  # nobody listens there
        router.prefill(1, PROMPT, OPTIONS)
        await router.receive(Tag.PREFILL_DONE)
        router.send(Role.PREFILL, Cancel(1, ErrorCode.CANCELLED))
        await router.until_free(Role.PREFILL)
