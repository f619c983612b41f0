"""Receptions against a prefill worker played by the test: refusals, violations, every end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import oracle
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
    DecodeRequest,
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
    Usage,
    decode_error,
    decode_map,
    decode_prefill_result,
)
from worker.config import Config
from worker.engine.outputs import Displaced
from worker.engine.thread import Call
from worker.environment import WorkerContext
from worker.executor.hash import LAYOUT, create
from worker.roles.decode import DecodeRole
from worker.transfer.receiver import (
    MAX_ENDED,
    MAX_OFFERED_TOKENS,
    MAX_OFFERS,
    SHARED_S,
    IncomingTransfers,
)
from worker.transfer.sockets import KVPlane
from worker.transfer.thread import Copies

TOKEN_BYTES = LAYOUT.token_bytes
PROMPT = [(11 * i) % 1000 for i in range(300)]
TOTAL = len(PROMPT) * TOKEN_BYTES
OPTIONS = Options(max_tokens=20, ignore_eos=True)
WHOLE = range(300)


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


class Idle:
    """An engine that computes nothing."""

    is_busy = False

    def start(self) -> None: ...
    def post(self, call: Call) -> None: ...
    def stop(self, *, wait_s: float | None = None) -> bool:
        return True


async def test_frames_are_counted_and_those_for_a_peer_that_is_gone() -> None:
    config = Config(role="decode", executor="hash", kv_bind="tcp://127.0.0.1:0")
    identity, copies, plane = Identity(Role.DECODE, 0, 1), Copies(1), KVPlane(1000)
    cache = create().allocate(8, 16)
    context = WorkerContext(config, identity, cache, Idle(), copies, plane, time.monotonic)
    failed = asyncio.Event()
    transfers = IncomingTransfers(context, lambda _: False, lambda _: None, lambda *_: failed.set())
    async with ScriptedPrefill(transfers.endpoint) as prefill:
        prefill.send(KvCache(2, 0, 0))
        assert await prefill.error() == (2, ErrorCode.UNKNOWN_REQUEST)
        prefill.offer(1, PROMPT)
        prefill.send(KvCache(3, 0, 0))
        assert await prefill.error() == (3, ErrorCode.UNKNOWN_REQUEST)
    await asyncio.wait_for(failed.wait(), 30)
    counts = {("kv_cache", "received", 3), ("error", "sent", 2)}
    traffic = plane.traffic
    assert (set(traffic.rows()), traffic.dropped) == (counts, {"worker_lost": 1})
    await transfers.close()
    await plane.close()
    copies.close()


async def test_a_worker_that_leaves_waits_for_no_memory_that_it_has_asked_for() -> None:
    config = Config(role="decode", executor="hash", kv_bind="tcp://127.0.0.1:0")
    copies, plane, is_asked = Copies(1), KVPlane(1000), asyncio.Event()

    async def fetch(*_: object) -> tuple[int, bytes]:
        is_asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody answers")

    rest = Idle(), copies, plane, time.monotonic
    cache = create().allocate(8, 16)
    context = WorkerContext(config, Identity(Role.DECODE, 0, 1), cache, *rest, fetch=fetch)
    transfers = IncomingTransfers(context, lambda _: False, lambda _: None, lambda *_: None)
    async with ScriptedPrefill(transfers.endpoint) as prefill:
        prefill.offer(1, PROMPT, memory="baton-silent")
        await asyncio.wait_for(is_asked.wait(), 30)
        await asyncio.wait_for(transfers.close(), 30)
    await plane.close()
    copies.close()


async def test_memory_of_a_peer_that_has_left_is_not_asked_for() -> None:
    class Heard(KVPlane):
        """A plane whose frames the test makes up."""

        def hub(self, on_message: Any, on_lost: Any) -> Hub:
            self.on_message, self.on_lost = on_message, on_lost
            return super().hub(on_message, on_lost)

    asked, is_second_asked = [], asyncio.Event()

    async def fetch(name: str, greeting: bytes) -> tuple[int, bytes]:
        asked.append(name)
        if name == "baton-2":
            is_second_asked.set()
        raise ConnectionRefusedError

    config = Config(role="decode", executor="hash", kv_bind="tcp://127.0.0.1:0")
    identity, copies, plane = Identity(Role.DECODE, 0, 1), Copies(1), Heard(1000)
    cache, clock = create().allocate(8, 16), time.monotonic
    context = WorkerContext(config, identity, cache, Idle(), copies, plane, clock, fetch=fetch)
    transfers = IncomingTransfers(context, lambda _: False, lambda _: None, lambda *_: None)
    for number in (1, 2):
        offer, peer = offer_of(PROMPT, memory=f"baton-{number}"), b"prefill-0-%d" % number
        plane.on_message(peer, encode(KvCache(number, 0, 0), offer))
        if number == 1:
            plane.on_lost(peer)  # it said this and left
    await asyncio.wait_for(is_second_asked.wait(), 30)
    assert asked == ["baton-2"]
    await transfers.close()
    await plane.close()
    copies.close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"layout": KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype="uint8")}, 18),
        ({"total_bytes": TOTAL + 1}, 2),
        ({"num_tokens": 301}, 2),
        ({"token_ids": b"123"}, 2),
        ({"token_ids": b"\xff" * 1200}, 3),  # not in the vocabulary
    ],
)
async def test_an_offer_that_cannot_be_is_refused(changes: dict[str, Any], code: int) -> None:
    async with stage() as (router, prefill):
        prefill.offer(1, PROMPT, **changes)
        assert await prefill.error() == (1, code)
        await accepted(prefill, 2)
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


async def test_a_client_reads_which_worker_gave_it_up() -> None:
    async with stage() as (router, prefill):
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        await accepted(prefill, 1)
        prefill.cancel(1)
        detail = decode_error((await router.receive(Tag.ERROR)).body())
        assert "with prefill-0 failed" in detail.message


async def test_an_offer_over_the_limit_is_refused() -> None:
    async with stage(max_kv_transfer_bytes=TOTAL - 1) as (router, prefill):
        prefill.offer(1, PROMPT)
        assert await prefill.error() == (1, ErrorCode.KV_TRANSFER_TOO_LARGE)
        await router.until_free(Role.DECODE)


async def test_an_offer_that_can_never_fit_is_refused() -> None:
    async with stage(num_blocks=4) as (router, prefill):
        prefill.offer(1, PROMPT)
        assert await prefill.error() == (1, ErrorCode.OUT_OF_BLOCKS)
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


async def test_a_segment_that_comes_twice_counts_once() -> None:
    async with stage() as (router, prefill):
        await accepted(prefill, 1)
        for _ in range(2):
            prefill.segment(1, range(200), 1, 2)
        prefill.segment(1, range(200, 300), 2, 2)
        assert [(await prefill.ack())[0].kv_bytes for _ in range(2)] == [200 * TOKEN_BYTES, TOTAL]
        router.decode(1, [*PROMPT, 5], 1, OPTIONS)
        await router.tokens(1)


@pytest.mark.parametrize(
    ("tokens", "number"),
    [(range(100, 300), 1), (range(200, 301), 2), (range(100, 300), 2), (range(200, 300), 3)],
)
async def test_a_segment_that_breaks_the_plan_ends_the_transfer(tokens: range, number: int) -> None:
    async with stage() as (router, prefill):
        await accepted(prefill, 1)
        prefill.segment(1, range(200), 1, 2)
        await prefill.ack()
        prefill.segment(1, tokens, number, 2)
        assert await prefill.error() == (1, ErrorCode.PROTOCOL)
        await router.until_free(Role.DECODE)


async def test_a_segment_beyond_the_credit_is_refused() -> None:
    executor = GatedExecutor(max_model_len=200_000)
    async with stage(executor=executor, num_blocks=8000, credit_bytes=4 << 20) as (router, prefill):
        executor.cache.gate.clear()
        prefill.offer(1, PROMPT * 400)  # 7.3 MiB
        assert (await prefill.ack())[1].credit == 4 << 20
        prefill.segment(1, range(65_536), 1, 2)
        prefill.segment(1, range(65_536, 120_000), 2, 2)  # the first is not stored yet
        assert await prefill.error() == (1, ErrorCode.PROTOCOL)
        executor.cache.gate.set()
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


async def test_frames_of_unknown_transfers_are_answered() -> None:
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


async def test_a_peer_that_vanishes_takes_its_transfers_along() -> None:
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


async def test_nobody_touches_the_transfer_of_another() -> None:
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
    [b"decode-1-1", b"router-1", b"prefill-0", b"prefill-00-1", b"prefill-0-1-1", b"xprefill-0-1"],
)
async def test_only_a_prefill_worker_may_offer(name: bytes) -> None:
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


async def test_kv_that_nobody_asked_for_is_shared_with_nobody() -> None:
    """A peer stores zeros for a text; who asks for the text gets what its own prefill sent."""
    clock = Clock()
    async with (
        stage(clock=clock) as (router, prefill),
        running(router, "prefill", rank=1),
    ):
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        clock.now += SHARED_S
        router.announce(router.details[Role.DECODE].kv_endpoint)
        router.prefill(2, PROMPT, OPTIONS)
        result = decode_prefill_result((await router.receive(Tag.PREFILL_DONE)).body())
        router.decode(2, [*PROMPT, result.token_id], 5, OPTIONS)
        assert await router.tokens(5) == oracle(PROMPT, 6, OPTIONS)[1:]
        usage = decode_map(Usage, (await router.receive(Tag.DECODE_DONE)).body())
        assert usage.kv_skipped_tokens == 0
        clock.now += 30
        assert await prefill.error() == (1, ErrorCode.TRANSFER_FAILED)
        await router.until_free(Role.DECODE)


async def test_equal_texts_do_not_wait_for_kv_that_no_router_asks_for() -> None:
    """A client that sends no DECODE_REQUEST holds up nobody who asks the same."""
    async with stage(lease_s=300) as (router, prefill):
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        await accepted(prefill, 2)  # the same prompt, of somebody else
        router.decode(2, [*PROMPT, 5], 3, OPTIONS)
        prefill.segment(2, WHOLE)
        assert len(await router.tokens(3)) == 3


async def test_kv_that_is_never_claimed_goes_without_a_trace() -> None:
    clock = Clock()
    async with stage(clock=clock) as (router, prefill):
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        clock.now += 30
        assert await prefill.error() == (1, ErrorCode.TRANSFER_FAILED)
        await until_free_without_a_trace(router)
        assert not router.loads_by_role[Role.DECODE].stored


async def test_an_offer_of_other_tokens_than_those_asked_for_is_refused() -> None:
    """And the right one is still welcome."""
    async with stage() as (router, prefill), ScriptedPrefill(router, b"prefill-1-1") as other:
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        await heard(router)
        other.offer(1, PROMPT[::-1])
        assert await other.error() == (1, ErrorCode.PROTOCOL)
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        assert len(await router.tokens(3)) == 3


async def test_kv_of_a_text_that_is_being_continued_is_not_taken_again() -> None:
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


async def test_offers_without_bytes_hold_a_quarter_for_a_lease() -> None:
    """64 of them that were to hold every block; another peer's is let in at once."""
    clock = Clock()
    async with (
        stage(num_blocks=64 * 20, clock=clock) as (router, prefill),
        ScriptedPrefill(router, b"prefill-1-1") as other,
    ):
        for request_id in range(100, 164):
            prefill.offer(request_id, [request_id, *PROMPT[1:]])
        granted = [(await prefill.ack())[0].request_id for _ in range(17)]  # of 19 blocks each
        await accepted(other, 1)
        assert prefill.is_quiet
        load = await router.load(Role.DECODE)
        assert load.used == 18 * 19
        clock.now += 30
        waiting = set(granted)
        while waiting:  # those that were never granted are silent for as long, and end among them
            frame = (await prefill.receive()).frame
            if isinstance(frame, Error):
                assert frame.code == ErrorCode.TRANSFER_FAILED
                waiting.discard(frame.request_id)
            else:  # an offer that waited has the blocks of one that ended before the others
                assert isinstance(frame, KvCacheAck), frame
                assert frame.request_id not in granted


async def test_an_offer_that_waits_for_blocks_has_them_as_soon_as_a_router_asks() -> None:
    async with stage(num_blocks=80) as (router, prefill):
        for request_id in (1, 2, 3):  # 19 blocks each
            prefill.offer(request_id, [request_id, *PROMPT])
        assert [(await prefill.ack())[0].request_id for _ in range(2)] == [1, 2]
        await router.load(Role.DECODE)
        assert prefill.is_quiet, "its peer holds a quarter"
        router.decode(3, [3, *PROMPT, 5], 1, OPTIONS)
        assert (await prefill.ack())[0].request_id == 3
        for request_id in (1, 2, 3):
            prefill.cancel(request_id)
        await router.until_free(Role.DECODE)


async def test_a_peer_over_its_share_gives_way_to_what_a_router_asks_for() -> None:
    """It holds 136 of 144 blocks, sends nothing but keepalives, and loses only what is too much."""
    executor = GatedExecutor(max_model_len=4000)
    async with (
        stage(num_blocks=144, executor=executor) as (router, bad),
        ScriptedPrefill(router, b"prefill-1-1") as other,
    ):
        large = [3] * 1630  # 102 blocks
        for request_id, prompt in ((1, [1] * 270), (2, [2] * 270), (3, large)):
            bad.offer(request_id, prompt)
            assert (await bad.ack())[0].request_id == request_id
        other.offer(9, PROMPT)
        await heard(router)
        assert bad.is_quiet and other.is_quiet, "nobody has asked for it"
        router.decode(9, [*PROMPT, 5], 3, OPTIONS)
        assert await bad.error() == (3, ErrorCode.OVERLOADED)
        assert (await other.ack())[0].request_id == 9
        other.segment(9, WHOLE)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)

        bad.offer(4, large)
        for number in (1, 2):
            bad.send(KvCache(number, 0, 0))
            assert (await bad.ack())[0].request_id == number, "these were not too much"
        assert (await router.load(Role.DECODE)).used == 2 * 17
        router.decode(4, [*large, 5], 3, OPTIONS)
        assert (await bad.ack())[0].request_id == 4, "it waited until a router asked"
        for request_id in (1, 2, 4):
            bad.cancel(request_id)
        await router.until_free(Role.DECODE)


async def test_what_a_router_asks_for_meanwhile_does_not_give_way() -> None:
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


async def test_an_offer_that_was_asked_for_before_does_not_wait() -> None:
    async with stage(num_blocks=80) as (router, prefill):
        router.decode(3, [3, *PROMPT, 5], 1, OPTIONS)
        await heard(router)
        for request_id in (1, 2, 3):
            prefill.offer(request_id, [request_id, *PROMPT])
        assert {(await prefill.ack())[0].request_id for _ in range(3)} == {1, 2, 3}
        for request_id in (1, 2, 3):
            prefill.cancel(request_id)
        await router.until_free(Role.DECODE)


async def test_an_offer_that_waits_for_its_bytes_has_them_as_soon_as_a_router_asks() -> None:
    executor = GatedExecutor(max_model_len=200_000)
    budget = {"credit_bytes": 4 << 20, "max_kv_inflight_bytes": 4 << 20, "num_blocks": 9000}
    async with stage(executor=executor, **budget) as (router, prefill):
        prompts = {request_id: [request_id] * 18_000 for request_id in (1, 2)}  # 1.1 MiB
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


async def test_a_peer_may_have_so_many_offers_at_a_time() -> None:
    blocks = {"num_blocks": 8 * MAX_OFFERS}  # a quarter is more than enough for all of them
    async with (
        stage(**blocks) as (router, prefill),
        ScriptedPrefill(router, b"prefill-1-1") as other,
    ):
        for request_id in range(1, MAX_OFFERS + 1):
            prefill.offer(request_id, [request_id])
        for _ in range(MAX_OFFERS):
            await prefill.ack()
        last, next_ = MAX_OFFERS + 1, MAX_OFFERS + 2
        prefill.offer(last, PROMPT)
        assert await prefill.error() == (last, ErrorCode.OVERLOADED)
        await accepted(other, last)
        prefill.cancel(1)
        await accepted(prefill, next_)
        for request_id in (*range(2, MAX_OFFERS + 1), next_):
            prefill.cancel(request_id)
        other.cancel(last)
        await until_free_without_a_trace(router)


async def test_a_peer_may_have_so_many_tokens_unclaimed() -> None:
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
def test_whatever_segments_come_nothing_is_held_in_the_end(
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


async def test_offers_take_turns_at_the_bytes_in_flight() -> None:
    executor = GatedExecutor(max_model_len=200_000)
    budget = {"credit_bytes": 4 << 20, "max_kv_inflight_bytes": 4 << 20, "num_blocks": 9000}
    async with stage(executor=executor, **budget) as (router, prefill):
        prefill.offer(1, PROMPT * 250)  # 4.6 MiB: all there is
        await prefill.ack()
        for request_id in (2, 3):
            prefill.offer(request_id, [request_id, *PROMPT])
            prefill.send(KvCache(request_id, 0, 0))
            ack, credit = await prefill.ack()
            assert (ack.request_id, credit) == (request_id, Credit(0, 0, 0))
        assert router.is_quiet
        prefill.segment(1, range(40_000), 1, 2)
        await prefill.ack()
        prefill.segment(1, range(40_000, 75_000), 2, 2)
        assert (await prefill.ack())[1].ready
        router.decode(1, [*PROMPT * 250, 5], 1, OPTIONS)  # else it holds half of all blocks
        assert [(await prefill.ack())[0].request_id for _ in range(2)] == [2, 3]
        for request_id in (2, 3):
            prefill.cancel(request_id)
        await router.until_free(Role.DECODE)


async def test_kv_nobody_claims_is_freed_after_a_lease() -> None:
    clock = Clock()
    async with stage(clock=clock) as (router, prefill):
        await accepted(prefill, 1)
        prefill.segment(1, WHOLE)
        assert (await prefill.ack())[1].ready
        clock.now += 30
        assert await prefill.error() == (1, ErrorCode.TRANSFER_FAILED)
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


async def test_a_sender_that_gives_up_ends_the_request() -> None:
    async with stage() as (router, prefill):
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        await accepted(prefill, 1)
        prefill.cancel(1)
        assert (await router.receive(Tag.ERROR)).frame == Error(1, ErrorCode.TRANSFER_FAILED)
        await router.until_free(Role.DECODE)


async def test_the_offer_of_a_request_that_ended_is_refused() -> None:
    async with stage() as (router, prefill):
        router.send(Role.DECODE, Cancel(1, ErrorCode.CANCELLED))
        router.send(Role.DECODE, DecodeRequest(2, 1))
        prefill.send(KvCache(2, 0, 0))
        assert await prefill.error() == (2, ErrorCode.UNKNOWN_REQUEST)
        await router.until_free(Role.DECODE)
        prefill.offer(1, PROMPT)
        assert await prefill.error() == (1, ErrorCode.UNKNOWN_REQUEST)
        router.send(Role.DECODE, Cancel(2, ErrorCode.CANCELLED))


async def test_of_what_has_ended_the_oldest_is_forgotten() -> None:
    async with stage() as (router, prefill):
        for request_id in range(1, MAX_ENDED + 2):
            router.send(Role.DECODE, Cancel(request_id, ErrorCode.CANCELLED))
        await heard(router)
        for request_id in (2, MAX_ENDED + 1):
            prefill.offer(request_id, PROMPT)
            assert await prefill.error() == (request_id, ErrorCode.UNKNOWN_REQUEST)
        await accepted(prefill, 1)
        prefill.cancel(1)


async def test_an_offer_of_what_a_lost_router_asked_for_is_refused() -> None:
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


async def test_kv_that_comes_after_the_deadline_of_its_request_is_refused() -> None:
    options = Options(max_tokens=20, deadline_ms=100)
    clock = Clock()
    async with stage(clock=clock) as (router, prefill):
        router.decode(1, [*PROMPT, 5], 3, options)
        await heard(router)
        await accepted(prefill, 1)
        clock.now += 0.1
        assert (await router.receive(Tag.ERROR)).frame == Error(1, ErrorCode.DEADLINE_EXCEEDED)
        assert await prefill.error() == (1, ErrorCode.CANCELLED)
        await router.until_free(Role.DECODE)


async def test_the_id_of_a_transfer_that_ended_is_not_taken_again() -> None:
    async with stage() as (router, prefill):
        prefill.offer(1, PROMPT)
        await prefill.ack()
        prefill.cancel(1)
        prefill.offer(1, PROMPT)
        assert await prefill.error() == (1, ErrorCode.UNKNOWN_REQUEST)
        await until_free_without_a_trace(router)


async def test_blocks_on_their_way_are_never_those_of_another_offer() -> None:
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


@pytest.mark.parametrize(
    ("cuts", "limit", "digest", "code"),
    [
        ([WHOLE], TOTAL - 1, None, ErrorCode.PROTOCOL),
        ([WHOLE], 0, None, ErrorCode.PROTOCOL),
        ([range(299)], TOTAL, None, ErrorCode.PROTOCOL),
        ([range(200), range(100, 200)], TOTAL, None, ErrorCode.PROTOCOL),
        ([WHOLE], TOTAL, 5, ErrorCode.TRANSFER_FAILED),
    ],
)
async def test_kv_with_the_offer_that_must_not_be_is_refused(
    cuts: list[range], limit: int, digest: int | None, code: ErrorCode
) -> None:
    async with stage(kv_unasked_bytes=limit) as (router, prefill):
        prefill.offer_with_kv(1, PROMPT, *cuts, digest=digest)
        assert await prefill.error() == (1, code)
        prefill.send(KvCache(1, 0, 0))
        assert await prefill.error() == (1, ErrorCode.UNKNOWN_REQUEST)
        await accepted(prefill, 2)
        prefill.cancel(2)
        await router.until_free(Role.DECODE)


async def test_kv_with_an_offer_that_comes_again_has_the_same_limit() -> None:
    async with stage(kv_unasked_bytes=TOTAL - 1) as (router, prefill):
        await accepted(prefill, 1)
        prefill.offer_with_kv(1, PROMPT, WHOLE)
        assert await prefill.error() == (1, ErrorCode.PROTOCOL)
        prefill.cancel(1)
        await router.until_free(Role.DECODE)


async def test_kv_with_the_offer_is_dropped_where_there_is_no_room_for_it() -> None:
    """One transfer has all the bytes in flight: the next gets credit when it has ended."""
    budget = {"credit_bytes": 4 << 20, "max_kv_inflight_bytes": 4 << 20, "num_blocks": 9000}
    many = (4 << 20) // TOKEN_BYTES
    executor = GatedExecutor(max_model_len=2 * many)
    async with stage(executor=executor, **budget) as (router, prefill):
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


async def test_kv_with_the_offer_of_a_prompt_that_is_held_is_dropped() -> None:
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


async def test_kv_of_a_request_that_is_over_is_not_taken_again() -> None:
    """Nobody would ask for it, and its blocks would be held for a lease."""
    async with stage() as (router, prefill):
        prefill.offer_with_kv(1, PROMPT, WHOLE)
        _, credit = await prefill.ack()
        assert credit.ready
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        prefill.offer_with_kv(1, PROMPT, WHOLE)
        assert (await prefill.receive()).frame == Error(1, ErrorCode.UNKNOWN_REQUEST)
        await router.until_free(Role.DECODE)


async def test_kv_with_the_offer_is_sent_once_however_often_the_offer_comes() -> None:
    async with stage() as (router, prefill):
        for _ in range(2):
            prefill.offer_with_kv(1, PROMPT, WHOLE)
        for _ in range(2):  # the second is a keepalive, perhaps before all is stored
            _, credit = await prefill.ack()
            if credit.ready:
                break
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)
