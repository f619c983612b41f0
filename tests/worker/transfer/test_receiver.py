"""Receptions against a prefill worker played by the test: refusals, violations, every end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.worker.scripted import (
    EPOCH,
    Clock,
    GatedExecutor,
    ScriptedPrefill,
    ScriptedRouter,
    heard,
    offer_of,
    running,
    scripted_router,
)
from wire.aio.zmq import Hub
from wire.errors import ErrorCode
from wire.frames import (
    Cancel,
    Error,
    Heartbeat,
    KvCache,
    KvCacheAck,
    Role,
    Tag,
)
from wire.identity import Identity
from wire.layout import KVLayout
from wire.options import Options
from wire.parts import encode
from wire.payloads import (
    Credit,
    decode_error,
)
from worker.config import Config
from worker.engine.outputs import Displaced
from worker.environment import Environment, WorkerContext
from worker.executor.hash import LAYOUT, create
from worker.roles.decode import DecodeRole
from worker.transfer.receiver import (
    MAX_ENDED,
    MAX_OFFERED_TOKENS,
    IncomingTransfers,
)
from worker.transfer.sockets import KVPlane
from worker.transfer.thread import Copies

TOKEN_BYTES = LAYOUT.token_bytes
PROMPT = [(11 * i) % 1000 for i in range(300)]
TOTAL = len(PROMPT) * TOKEN_BYTES
OPTIONS = Options(max_tokens=20, ignore_eos=True)
WHOLE = range(300)
OTHER = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype="uint8")
BUDGET = {"credit_bytes": 4 << 20, "max_kv_inflight_bytes": 4 << 20, "num_blocks": 9000}


@asynccontextmanager
async def stage(**config: Any) -> AsyncIterator[tuple[ScriptedRouter, ScriptedPrefill]]:
    """A real decode worker between a router and a prefill worker of the test's."""
    async with (
        scripted_router() as router,
        running(router, "decode", **config),
        ScriptedPrefill(router) as prefill,
    ):
        yield router, prefill


async def accepted(prefill: ScriptedPrefill, request_id: int, cached_tokens: int = 0) -> None:
    prefill.offer(request_id, PROMPT)
    ack, credit = await prefill.ack()
    assert (ack.request_id, ack.kv_bytes) == (request_id, 0)
    assert credit == Credit(TOTAL - cached_tokens * TOKEN_BYTES, cached_tokens, 0)


async def test_every_segment_is_acknowledged_and_the_last_is_ready() -> None:
    async with stage() as (router, prefill):
        await accepted(prefill, 1)
        for number, tokens in ((2, range(100, 300)), (1, range(100))):  # in any order
            prefill.segment(1, tokens, number, 2)
        for kv_bytes, ready in ((200 * TOKEN_BYTES, 0), (TOTAL, 1)):
            ack, credit = await prefill.ack()
            assert (ack.kv_bytes, credit) == (kv_bytes, Credit(TOTAL, 0, ready))
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)


async def test_a_broken_segment_fails_closed() -> None:
    async with stage() as (router, prefill):
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        await accepted(prefill, 1)
        prefill.segment(1, range(200), 1, 2)
        await prefill.ack()
        prefill.segment(1, range(200, 300), 2, 2, digest=1)
        assert await prefill.error() == (1, ErrorCode.TRANSFER_FAILED)
        assert (await router.receive(Tag.ERROR)).frame == Error(1, ErrorCode.TRANSFER_FAILED)
        await router.until_free(Role.DECODE)
        await accepted(prefill, 2)  # nothing of it is in the prefix cache
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


async def test_a_copy_that_breaks_fails_closed() -> None:
    executor = GatedExecutor()
    async with stage(executor=executor) as (router, prefill):
        executor.cache.problem = RuntimeError("no device")
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        assert await prefill.error() == (1, ErrorCode.INTERNAL)
        await router.until_free(Role.DECODE)


async def test_a_cached_prefix_is_matched_for_offers_with_its_salt_only() -> None:
    async with stage() as (router, prefill):
        prefill.offer(1, PROMPT, cache_salt="a")
        assert (await prefill.ack())[1].cached_tokens == 0
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        router.decode(1, [*PROMPT, 5], 3, structs.replace(OPTIONS, cache_salt="a"))
        await router.tokens(3)
        await router.receive(Tag.DECODE_DONE)
        for request_id, (salt, has_it) in enumerate({"b": 0, "": 0, "a": 1}.items(), 2):
            prefill.offer(request_id, PROMPT, cache_salt=salt)
            assert bool((await prefill.ack())[1].cached_tokens) == has_it, salt
            prefill.cancel(request_id)
        await router.until_free(Role.DECODE)


@pytest.mark.parametrize("is_asked_first", [True, False])
async def test_kv_of_another_salt_than_requested_is_refused(*, is_asked_first: bool) -> None:
    async with stage() as (router, prefill):
        asked = structs.replace(OPTIONS, cache_salt="a")
        if is_asked_first:
            router.decode(1, [*PROMPT, 5], 3, asked)
            await heard(router)
        prefill.offer(1, PROMPT, cache_salt="b")
        if not is_asked_first:
            await prefill.ack()
            router.decode(1, [*PROMPT, 5], 3, asked)
        assert await prefill.error() == (1, ErrorCode.PROTOCOL)
        if not is_asked_first:  # else the request waits for another offer
            ended = Error(1, ErrorCode.TRANSFER_FAILED)
            assert (await router.receive(Tag.ERROR)).frame == ended
        router.send(Role.DECODE, Cancel(1, 0))
        await router.until_free(Role.DECODE)


async def test_a_segment_before_the_reservation_is_refused() -> None:
    async with stage(num_blocks=20) as (router, prefill):
        await accepted(prefill, 1)
        prefill.offer(2, PROMPT)  # waits for blocks
        prefill.send(KvCache(2, 0, 0))
        ack, credit = await prefill.ack()
        assert (ack.request_id, ack.kv_bytes, credit) == (2, 0, Credit(0, 0, 0))
        prefill.segment(2, WHOLE)
        assert await prefill.error() == (2, ErrorCode.PROTOCOL)
        prefill.cancel(1)
        await router.until_free(Role.DECODE)


async def test_bad_frames_are_answered_with_an_error() -> None:
    async with stage() as (_, prefill):
        prefill.send(KvCache(5, 0, 0))
        assert await prefill.error() == (5, ErrorCode.UNKNOWN_REQUEST)
        prefill.segment(6, WHOLE)
        assert await prefill.error() == (6, ErrorCode.UNKNOWN_REQUEST)
        prefill.cancel(7)  # ignored
        prefill.send_raw(b"no tag", b"")
        assert await prefill.error() == (0, ErrorCode.PROTOCOL)
        prefill.send(Heartbeat(0, 0, 0))  # not of this plane
        assert await prefill.error() == (0, ErrorCode.PROTOCOL)
        prefill.send(KvCache(5, 0, 2))  # a keepalive has no segments
        assert await prefill.error() == (5, ErrorCode.PROTOCOL)
        prefill.send(KvCache(8, 0, 0), b"\xc1")
        assert await prefill.error() == (8, ErrorCode.PROTOCOL)
        await accepted(prefill, 9)


async def test_a_lost_peer_ends_its_transfers() -> None:
    async with stage() as (router, prefill):
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        await heard(router)
        await accepted(prefill, 1)
        prefill.segment(1, range(200), 1, 2)
        await prefill.ack()
        await prefill.close()
        assert (await router.receive(Tag.ERROR)).frame == Error(1, ErrorCode.WORKER_LOST)
        await router.until_free(Role.DECODE)


async def test_kv_that_is_complete_outlives_its_sender() -> None:
    async with stage() as (router, prefill):
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        await prefill.close()
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3


async def test_a_peer_cannot_touch_the_transfer_of_another() -> None:
    async with stage() as (router, prefill), ScriptedPrefill(router, b"prefill-1-1") as other:
        await accepted(prefill, 1)
        other.cancel(1)
        other.segment(1, WHOLE)
        assert await other.error() == (1, ErrorCode.UNKNOWN_REQUEST)
        other.offer(1, PROMPT)
        assert await other.error() == (1, ErrorCode.UNKNOWN_REQUEST)
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        router.decode(1, [*PROMPT, 5], 1, OPTIONS)
        await router.tokens(1)


@pytest.mark.parametrize(
    "name",
    [b"router-0-1", b"router-1", b"prefill-0", b"prefill-00-1", b"prefill-0-1-1", b"xprefill-0-1"],
)
async def test_only_a_worker_may_offer(name: bytes) -> None:
    async with stage() as (router, _), ScriptedPrefill(router, name) as other:
        other.offer(1, PROMPT)
        assert await other.error() == (0, ErrorCode.PROTOCOL)
        other.send(KvCache(1, 0, 0))
        assert await other.error() == (0, ErrorCode.PROTOCOL)
        await router.until_free(Role.DECODE)


async def until_free_without_a_trace(router: ScriptedRouter) -> None:
    await router.until_free(Role.DECODE)
    load = router.loads_by_role[Role.DECODE]
    assert (load.free, load.used, load.cached) == (load.total, 0, 0)


async def test_equal_prompts_do_not_wait_for_unclaimed_kv() -> None:
    """A client that sends no DECODE_REQUEST holds up nobody who asks the same."""
    async with stage(lease_s=300) as (router, prefill):
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        await accepted(prefill, 2)  # the same prompt, of somebody else
        router.decode(2, [*PROMPT, 5], 3, OPTIONS)
        prefill.segment(2, WHOLE)
        assert len(await router.tokens(3)) == 3


async def test_a_decoding_request_cannot_be_offered_again() -> None:
    """Nor can whoever offers and cancels it end the text."""
    async with (
        stage(step_delay_s=0.01) as (router, prefill),
        ScriptedPrefill(router, b"prefill-1-1") as other,
    ):
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        router.decode(1, [*PROMPT, 5], 20, OPTIONS)
        await router.tokens(1)
        for peer in (other, prefill):
            peer.offer(1, PROMPT)
            peer.cancel(1)
        assert await other.error() == (1, ErrorCode.UNKNOWN_REQUEST)
        await router.tokens(19)
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)


async def test_a_claimed_transfer_is_not_displaced() -> None:
    """The engine said so before it heard of that."""
    async with (
        scripted_router() as router,
        running(router, "decode") as process,
        ScriptedPrefill(router) as prefill,
    ):
        await accepted(prefill, 1)
        prefill.offer(2, [2, *PROMPT])
        await prefill.ack()
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        await heard(router)
        role = process.worker.role
        assert isinstance(role, DecodeRole)
        role.on_outputs([Displaced(1), Displaced(2)])
        assert await prefill.error() == (2, ErrorCode.OVERLOADED)
        prefill.segment(1, WHOLE)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)


async def test_the_offers_of_a_peer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.transfer.receiver.MAX_OFFERS", 3)
    async with stage() as (router, prefill), ScriptedPrefill(router, b"prefill-1-1") as other:
        for request_id in (1, 2, 3):
            prefill.offer(request_id, [request_id])
            await prefill.ack()
        prefill.offer(4, PROMPT)
        assert await prefill.error() == (4, ErrorCode.OVERLOADED)
        await accepted(other, 4)
        prefill.cancel(1)
        await accepted(prefill, 5)
        for request_id in (2, 3, 5):
            prefill.cancel(request_id)
        other.cancel(4)
        await until_free_without_a_trace(router)


async def test_the_unclaimed_tokens_of_a_peer_are_limited() -> None:
    longest = MAX_OFFERED_TOKENS - len(PROMPT) + 1
    async with stage() as (router, prefill), ScriptedPrefill(router, b"prefill-1-1") as other:
        await accepted(prefill, 1)
        prefill.offer(2, PROMPT, num_tokens=longest)
        assert await prefill.error() == (2, ErrorCode.OVERLOADED)
        await accepted(other, 3)
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)  # now it is claimed, and counts no more
        await heard(router)
        prefill.offer(4, PROMPT, num_tokens=longest)
        assert await prefill.error() == (4, ErrorCode.PROTOCOL), "there is room, but it lied"
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        await router.tokens(2)
        other.cancel(3)


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4))
@settings(max_examples=25)
def test_any_segments_leave_no_block_in_use(
    num_segments: int, ranges: list[tuple[int, int]]
) -> None:
    async def scene() -> None:
        async with stage() as (router, prefill):
            prefill.offer(1, PROMPT[:32])
            await prefill.ack()
            for number, (start, end) in enumerate(ranges, 1):
                prefill.segment(1, range(start, max(start, end)), number, num_segments)
            prefill.cancel(1)
            await until_free_without_a_trace(router)

    asyncio.run(scene())


async def test_blocks_are_not_given_back_while_a_copy_writes_to_them() -> None:
    executor = GatedExecutor()
    async with stage(executor=executor, num_blocks=20) as (router, prefill):
        executor.cache.gate.clear()
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        await executor.cache.until_reached()
        router.send(Role.DECODE, Cancel(1, ErrorCode.CANCELLED))
        assert await prefill.error() == (1, ErrorCode.CANCELLED)
        prefill.offer(2, PROMPT)  # needs the same blocks
        router.loads.clear()
        await router.until_joined(Role.DECODE)
        prefill.send(KvCache(2, 0, 0))
        assert await prefill.ack() == (KvCacheAck(2, 0), Credit(0, 0, 0))  # waits for blocks
        executor.cache.gate.set()
        ack, credit = await prefill.ack()
        assert (ack.request_id, credit.credit) == (2, TOTAL)
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


async def test_silence_for_a_lease_ends_a_transfer() -> None:
    clock = Clock()
    async with stage(clock=clock) as (router, prefill):
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        await heard(router)
        await accepted(prefill, 1)
        clock.now += 30
        assert await prefill.error() == (1, ErrorCode.TRANSFER_FAILED)
        assert (await router.receive(Tag.ERROR)).frame == Error(1, ErrorCode.TRANSFER_FAILED)
        await router.until_free(Role.DECODE)


async def test_the_oldest_ended_id_is_forgotten() -> None:
    async with stage() as (router, prefill):
        for request_id in range(1, MAX_ENDED + 2):
            router.send(Role.DECODE, Cancel(request_id, ErrorCode.CANCELLED))
        await heard(router)
        for request_id in (2, MAX_ENDED + 1):
            prefill.offer(request_id, PROMPT)
            assert await prefill.error() == (request_id, ErrorCode.UNKNOWN_REQUEST)
        await accepted(prefill, 1)
        prefill.cancel(1)


async def test_an_offer_for_a_lost_router_is_refused() -> None:
    lost = EPOCH << 32 | 1
    async with scripted_router() as router:
        router.epoch = 7 << 32 | EPOCH  # ids have the lower half of it
        async with running(router, "decode"), ScriptedPrefill(router) as prefill:
            router.epoch += 1  # another process of it
            num_hellos = len(router.hellos)
            router.send(Role.DECODE, Error(0, ErrorCode.UNKNOWN_PEER))
            await router.until(lambda: len(router.hellos) > num_hellos)
            await router.load(Role.DECODE)
            prefill.offer(lost, PROMPT)
            assert await prefill.error() == (lost, ErrorCode.UNKNOWN_REQUEST)
            await accepted(prefill, lost + (1 << 32))
            prefill.cancel(lost + (1 << 32))
            await router.until_free(Role.DECODE)


async def test_a_late_reservation_is_not_used_by_another_offer() -> None:
    """The engine tells which blocks an offer has while the loop reads CANCEL and the next offer."""
    async with stage() as (router, prefill):
        for request_id in range(2, 22):
            for num_blocks in range(1, 40):
                prefill.offer(request_id, [5] * 16 * num_blocks)
                prefill.cancel(request_id)
            await router.load(Role.DECODE)
        await until_free_without_a_trace(router)
        async with ScriptedPrefill(router, b"prefill-1-1") as other:
            await accepted(other, 1)
            other.segment(1, WHOLE)
            assert (await other.ack())[1].ready


async def test_kv_that_comes_with_the_offer_takes_one_answer() -> None:
    async with stage() as (router, prefill):
        prefill.offer_with_kv(1, PROMPT, range(200), range(200, 300))
        ack, credit = await prefill.ack()
        assert (ack.kv_bytes, credit) == (TOTAL, Credit(TOTAL, 0, 1))
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        assert prefill.is_quiet
        await router.until_free(Role.DECODE)


async def test_kv_with_an_offer_that_has_to_wait_is_dropped() -> None:
    """One transfer has all the bytes in flight: the next gets credit when it has ended."""
    many = (4 << 20) // TOKEN_BYTES
    executor = GatedExecutor(max_model_len=2 * many)
    async with stage(executor=executor, **BUDGET) as (router, prefill):
        prefill.offer(1, [3] * many)
        assert (await prefill.ack())[1].credit == 4 << 20
        prefill.offer_with_kv(2, PROMPT, WHOLE)
        prefill.send(KvCache(2, 0, 0))
        ack, credit = await prefill.ack()
        assert (ack, credit) == (KvCacheAck(2, 0), Credit(0, 0, 0))
        prefill.cancel(1)
        ack, credit = await prefill.ack()
        assert (ack, credit) == (KvCacheAck(2, 0), Credit(TOTAL, 0, 0))
        prefill.segment(2, WHOLE)
        ack, credit = await prefill.ack()
        assert (ack, credit) == (KvCacheAck(2, TOTAL), Credit(TOTAL, 0, 1))
        router.send(Role.DECODE, Cancel(2, ErrorCode.CANCELLED))
        await router.until_free(Role.DECODE)


async def test_kv_with_the_offer_of_a_cached_prompt_is_dropped() -> None:
    async with stage() as (router, prefill):
        for request_id, cached in ((1, 0), (2, 288)):
            prefill.offer_with_kv(request_id, PROMPT, WHOLE)
            ack, credit = await prefill.ack()
            if cached:
                rest = 12 * TOKEN_BYTES
                assert (ack.kv_bytes, credit) == (0, Credit(rest, cached, 0))
                prefill.segment(request_id, range(288, 300))
                ack, credit = await prefill.ack()
            assert credit.ready
            router.decode(request_id, [*PROMPT, 5], 3, OPTIONS)
            assert len(await router.tokens(3)) == 3
            await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)


@pytest.mark.parametrize(
    ("settings", "changes", "code"),
    [
        (
            {},
            {"layout": KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype="uint8")},
            18,
        ),
        ({}, {"token_ids": b"123"}, ErrorCode.PROTOCOL),
        ({}, {"token_ids": b"\xff" * 1200}, ErrorCode.INVALID_REQUEST),  # not in the vocabulary
        ({"max_kv_transfer_bytes": TOTAL - 1}, {}, ErrorCode.KV_TRANSFER_TOO_LARGE),
        ({"num_blocks": 4}, {}, ErrorCode.OUT_OF_BLOCKS),
    ],
)
async def test_an_impossible_offer_is_refused(
    settings: dict[str, Any], changes: dict[str, Any], code: int
) -> None:
    async with stage(**settings) as (router, prefill):
        prefill.offer(1, PROMPT, **changes)
        assert await prefill.error() == (1, code)
        await router.until_free(Role.DECODE)


@pytest.mark.parametrize(
    ("cuts", "limit", "digest", "is_offered", "code"),
    [
        ([WHOLE], TOTAL - 1, None, False, ErrorCode.PROTOCOL),
        ([WHOLE], TOTAL - 1, None, True, ErrorCode.PROTOCOL),
        ([range(299)], TOTAL, None, False, ErrorCode.PROTOCOL),
        ([WHOLE], TOTAL, 5, False, ErrorCode.TRANSFER_FAILED),
    ],
)
async def test_wrong_kv_in_an_offer_is_refused(
    cuts: list[range], limit: int, digest: int | None, is_offered: bool, code: ErrorCode
) -> None:
    async with stage(kv_unasked_bytes=limit) as (router, prefill):
        if is_offered:
            await accepted(prefill, 1)
        prefill.offer_with_kv(1, PROMPT, *cuts, digest=digest)
        assert await prefill.error() == (1, code)
        prefill.cancel(1)
        await router.until_free(Role.DECODE)


@pytest.mark.parametrize(
    ("settings", "num_tokens"),
    [({"num_blocks": 54}, 270), (BUDGET, 18_000)],  # 17 blocks each; 1.1 MiB each
    ids=["blocks", "bytes"],
)
async def test_an_offer_waits_for_its_share_until_a_router_asks_for_it(
    settings: dict[str, Any], num_tokens: int
) -> None:
    executor = GatedExecutor(max_model_len=200_000)
    async with stage(executor=executor, **settings) as (router, prefill):
        prompts = {request_id: [request_id] * num_tokens for request_id in (1, 2)}
        for request_id, prompt in prompts.items():
            prefill.offer(request_id, prompt)
        assert (await prefill.ack())[0].request_id == 1
        await router.load(Role.DECODE)
        assert prefill.is_quiet, "its peer holds a quarter"
        router.decode(2, [*prompts[2], 5], 1, OPTIONS)
        assert (await prefill.ack())[0].request_id == 2
        for request_id in (1, 2):
            prefill.cancel(request_id)
        await router.until_free(Role.DECODE)


class Plane(KVPlane):
    """A KV plane whose frames a test makes up."""

    def hub(self, on_message: Any, on_lost: Any) -> Hub:
        self.on_message, self.on_lost = on_message, on_lost
        return super().hub(on_message, on_lost)


async def test_a_lost_peer_is_not_asked_for_memory_and_a_silent_one_delays_no_close() -> None:
    asked, is_asked = list[str](), asyncio.Event()

    async def fetch(name: str, greeting: bytes) -> tuple[int, bytes]:
        asked.append(name)
        is_asked.set()
        await asyncio.Event().wait()
        raise AssertionError("the peer never answers")

    engine: Any = SimpleNamespace(post=lambda call: None)
    config = Config(role="decode", executor="hash", kv_bind="tcp://127.0.0.1:0")
    identity, copies, plane = Identity(Role.DECODE, 0, 1), Copies(), Plane(1000)
    parts = create().allocate(8, 16), engine, copies, plane, Environment(fetch=fetch)
    context = WorkerContext(config, identity, *parts)
    transfers = IncomingTransfers(context, lambda _: False, lambda _: None, lambda *_: None)
    for number in (1, 2):
        offer, peer = offer_of(PROMPT, memory=f"baton-{number}"), b"prefill-0-%d" % number
        plane.on_message(peer, encode(KvCache(number, 0, 0), offer))
        if number == 1:
            plane.on_lost(peer)
    await asyncio.wait_for(is_asked.wait(), 30)
    await asyncio.wait_for(transfers.close(), 30)
    assert asked == ["baton-2"]
    await plane.close()
    copies.close()


async def test_kv_that_no_router_claims_leaves_nothing_in_the_cache() -> None:
    clock = Clock()
    async with stage(clock=clock) as (router, prefill):
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        clock.now += 30
        assert await prefill.error() == (1, ErrorCode.TRANSFER_FAILED)
        prefill.offer(1, PROMPT)
        assert await prefill.error() == (1, ErrorCode.UNKNOWN_REQUEST), "an id is used once"
        await until_free_without_a_trace(router)
        assert not router.loads_by_role[Role.DECODE].stored


async def test_a_sender_that_gives_up_ends_the_request() -> None:
    async with stage() as (router, prefill):
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        await accepted(prefill, 1)
        prefill.cancel(1)
        error = await router.receive(Tag.ERROR)
        assert error.frame == Error(1, ErrorCode.TRANSFER_FAILED)
        assert "with prefill-0 failed" in decode_error(error.body()).message
        await router.until_free(Role.DECODE)
