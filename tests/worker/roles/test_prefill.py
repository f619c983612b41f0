"""The prefill role on real sockets: first tokens, refusals, and blocks that come back."""

from __future__ import annotations

import time
from math import inf

import pytest
from structlog.testing import capture_logs

from tests.oracle import oracle
from tests.worker.scripted import (
    Clock,
    GatedSteps,
    ScriptedDecode,
    pair,
    running,
    scripted_router,
)
from wire.errors import ErrorCode
from wire.frames import (
    NO_RANK,
    Cancel,
    DecodeRequest,
    Error,
    KvCache,
    KvCacheAck,
    PrefillDone,
    PrefillRequest,
    Role,
    Tag,
)
from wire.options import Options
from wire.payloads import (
    Credit,
    ErrorDetail,
    decode_map,
    decode_prefill_result,
    encode_prompt,
)
from wire.process.log_limit import AGAIN_S
from worker.executor.hash import EOS_TOKEN_IDS
from worker.roles.prefill import ROUND_TRIP_S, PrefillRole

PROMPT = [(7 * i) % 1000 for i in range(300)]
OPTIONS = Options(max_tokens=20, ignore_eos=True)
TOKEN_BYTES = 64


def prompt_that_ends_at_once() -> list[int]:
    """A prompt whose first token is an EOS token."""
    for start in range(3, 2000):
        if not oracle([start, 5], 1, Options()):
            return [start, 5]
    raise AssertionError("none found")


async def test_the_first_token_comes_with_the_bytes_handed_over() -> None:
    async with pair() as router:
        router.prefill(1, PROMPT, OPTIONS)
        message = await router.receive(Tag.PREFILL_DONE)
        assert message.frame == PrefillDone(1, len(PROMPT) * TOKEN_BYTES)
        result = decode_prefill_result(message.body())
        assert [result.token_id] == oracle(PROMPT, 1, OPTIONS)
        assert result.finish_reason is None
        await router.until_free(Role.PREFILL)


async def test_requests_that_fail_alike_are_one_line_and_their_number() -> None:
    clock = Clock()
    async with scripted_router() as router, running(router, "prefill", clock=clock) as process:
        with capture_logs() as logs:
            for request_id in (1, 2, 3):
                frame = PrefillRequest(request_id, 1, NO_RANK)
                router.send(Role.PREFILL, frame, encode_prompt([40_000], OPTIONS))
                failed = Error(request_id, ErrorCode.INVALID_REQUEST)
                assert (await router.receive(Tag.ERROR)).frame == failed
            clock.now += AGAIN_S
            process.worker.role.tick(clock.now)
    said = [line for line in logs if line["event"] == "request failed"]
    assert [(line.get("request"), line.get("repeated")) for line in said] == [(1, None), (None, 2)]
    assert {(line["stage"], line["code"]) for line in said} == {("prefill", "invalid_request")}


async def test_kv_is_offered_early_only_where_a_chunk_is_quick() -> None:
    """A decode worker keeps blocks from the offer on, and waits for a third of a lease."""
    executor = GatedSteps()
    async with (
        scripted_router() as router,
        ScriptedDecode() as decode,
        running(router, "prefill", executor=executor, lease_s=30.0) as process,
    ):
        router.announce(decode.endpoint)
        role = process.worker.role
        assert isinstance(role, PrefillRole)
        # How long the last prompt's first chunk took, and whether the next is offered before its.
        for request_id, seconds, is_early in ((1, inf, False), (2, 0.1, True), (3, 1.0, False)):
            role.first_chunk_s = seconds
            executor.close()
            asked_s = time.monotonic()
            router.prefill(request_id, [request_id, *PROMPT], OPTIONS)
            await executor.until_reached()
            if not is_early:
                router.send(Role.PREFILL, DecodeRequest(9, 1))  # what was to be said was said
                assert (await router.receive(Tag.ERROR)).frame == Error(9, ErrorCode.PROTOCOL)
                assert decode.is_quiet
                executor.gate.set()
            await decode.offered(request_id)
            executor.gate.set()
            await router.receive(Tag.PREFILL_DONE)
            assert role.first_chunk_s != seconds, "measured anew"
            assert role.first_chunk_s < time.monotonic() - asked_s
            router.send(Role.PREFILL, Cancel(request_id, ErrorCode.CANCELLED))
            assert (await decode.receive()).frame == Cancel(request_id, ErrorCode.CANCELLED)
        await router.until_free(Role.PREFILL)


async def test_kv_of_a_fast_chunk_goes_along_with_its_offer() -> None:
    executor = GatedSteps()
    async with (
        scripted_router() as router,
        ScriptedDecode() as decode,
        running(router, "prefill", executor=executor) as process,
    ):
        size = len(PROMPT) * TOKEN_BYTES
        role = process.worker.role
        assert isinstance(role, PrefillRole)
        router.announce(decode.endpoint)
        router.prefill(9, PROMPT, OPTIONS)
        await decode.offered(9)  # so the connection is up
        router.send(Role.PREFILL, Cancel(9, ErrorCode.CANCELLED))
        assert (await decode.receive()).frame == Cancel(9, ErrorCode.CANCELLED)
        await router.receive(Tag.PREFILL_DONE)
        # How long the last prompt's first chunk took, what is taken unasked, what comes.
        cases = ((0.0, size, 1), (0.0, size - 1, 0), (2 * ROUND_TRIP_S, size, 0))
        for request_id, (seconds, taken, num_segments) in enumerate(cases, start=1):
            router.announce(decode.endpoint, taken)
            role.first_chunk_s = seconds
            executor.close()
            router.prefill(request_id, PROMPT[::-1] if request_id == 2 else PROMPT, OPTIONS)
            await executor.until_reached()
            if num_segments:
                executor.gate.set()
            message = await decode.receive()
            assert message.frame == KvCache(request_id, 0, num_segments)
            executor.gate.set()
            await router.receive(Tag.PREFILL_DONE)
            router.send(Role.PREFILL, Cancel(request_id, ErrorCode.CANCELLED))
            assert (await decode.receive()).frame == Cancel(request_id, ErrorCode.CANCELLED)
        await router.until_free(Role.PREFILL)


async def test_a_request_for_one_token_hands_nothing_over() -> None:
    async with scripted_router() as router, running(router, "prefill"):
        options = Options(max_tokens=1, ignore_eos=True)
        router.prefill(1, PROMPT, options)
        message = await router.receive(Tag.PREFILL_DONE)
        assert message.frame == PrefillDone(1, 0)
        assert decode_prefill_result(message.body()).finish_reason == "length"
        await router.until_free(Role.PREFILL)


async def test_an_eos_token_first_takes_the_offer_back() -> None:
    async with pair() as router:
        router.prefill(1, prompt_that_ends_at_once(), Options(max_tokens=20))
        message = await router.receive(Tag.PREFILL_DONE)
        assert message.frame == PrefillDone(1, 0)
        result = decode_prefill_result(message.body())
        assert result.finish_reason == "stop" and result.stop_token_id in EOS_TOKEN_IDS
        await router.until_free(Role.PREFILL, Role.DECODE)


async def test_the_second_prompt_of_a_prefix_is_read_from_the_cache() -> None:
    async with scripted_router() as router, running(router, "prefill"):
        for request_id, cached_tokens in ((1, 0), (2, 288)):
            router.prefill(request_id, PROMPT, Options(max_tokens=1))
            message = await router.receive(Tag.PREFILL_DONE)
            assert decode_prefill_result(message.body()).cached_tokens == cached_tokens


async def test_a_transfer_may_be_over_before_the_first_token() -> None:
    executor = GatedSteps()
    async with (
        scripted_router() as router,
        ScriptedDecode() as decode,
        running(router, "prefill", executor=executor) as process,
    ):
        router.announce(decode.endpoint)
        role = process.worker.role
        assert isinstance(role, PrefillRole)
        role.first_chunk_s = 0.1  # it is offered early
        executor.close()
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        has_everything = Credit(0, len(PROMPT), 1)
        decode.send(KvCacheAck(1, 0), has_everything.pack())
        await router.until(lambda: role.transfers.ends["done"] == 1)
        executor.gate.set()
        message = await router.receive(Tag.PREFILL_DONE)
        assert [decode_prefill_result(message.body()).token_id] == oracle(PROMPT, 1, OPTIONS)
        await router.until_free(Role.PREFILL)
        assert not role.request_ids


async def test_a_decode_worker_that_does_not_answer_an_offer_ends_it_with_its_lease() -> None:
    clock = Clock()
    async with (
        scripted_router() as router,
        ScriptedDecode() as decode,
        running(router, "prefill", clock=clock),
    ):
        router.announce(decode.endpoint)
        router.prefill(1, PROMPT, OPTIONS)
        await decode.offered(1)
        await router.receive(Tag.PREFILL_DONE)
        clock.now += 30
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, ErrorCode.TRANSFER_FAILED)
        await router.until_free(Role.PREFILL)


async def test_without_a_decode_worker_the_request_is_refused() -> None:
    async with scripted_router() as router, running(router, "prefill"):
        router.prefill(1, PROMPT, OPTIONS)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, ErrorCode.NO_WORKER)
        assert decode_map(ErrorDetail, message.body()).worker == "prefill-0"


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"\x01\x00\x00\x00", ErrorCode.PROTOCOL),  # fewer ids than seq_len
        (encode_prompt([1, 2, 3], Options()) + b"\x81\xa1x\x01", ErrorCode.INVALID_REQUEST),
        (encode_prompt([1, 2, 40_000], Options()), ErrorCode.INVALID_REQUEST),
    ],
)
async def test_a_bad_request_ends_with_an_error_and_alone(payload: bytes, code: ErrorCode) -> None:
    async with pair() as router:
        router.send(Role.PREFILL, PrefillRequest(1, 3, 0), payload)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, code)
        router.prefill(2, PROMPT, OPTIONS)
        assert (await router.receive(Tag.PREFILL_DONE)).frame.request_id == 2  # type: ignore[attr-defined]


async def test_kv_over_the_limit_is_refused_before_anything_is_computed() -> None:
    limit = 100 * TOKEN_BYTES
    async with pair(prefill={"max_kv_transfer_bytes": limit}) as router:
        router.prefill(1, PROMPT, OPTIONS)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, ErrorCode.KV_TRANSFER_TOO_LARGE)
        assert str(limit) in decode_map(ErrorDetail, message.body()).message
        assert router.loads_by_role[Role.PREFILL].used == 0


async def test_nothing_is_read_of_cancelled_prompts_before_a_short_one() -> None:
    """Ten long prompts cancelled in the middle of a chunk: that chunk is all the next waits for."""
    executor, options = GatedSteps(), Options(max_tokens=1, ignore_eos=True)
    async with (
        scripted_router() as router,
        running(router, "prefill", executor=executor, max_ubatch_tokens=64),
    ):
        await router.until_free(Role.PREFILL)
        executor.close()
        executor.num_tokens.clear()  # of the warmup
        for request_id in range(1, 11):
            router.prefill(request_id, [request_id] * 2000, options)
        await executor.until_reached()
        for request_id in range(1, 11):
            router.send(Role.PREFILL, Cancel(request_id, ErrorCode.CANCELLED))
        router.prefill(11, PROMPT[:16], options)
        router.send(Role.PREFILL, DecodeRequest(12, 1))  # the answer shows that all was heard
        assert (await router.receive(Tag.ERROR)).frame == Error(12, ErrorCode.PROTOCOL)
        executor.gate.set()
        assert (await router.receive(Tag.PREFILL_DONE)).frame == PrefillDone(11, 0)
        assert executor.num_tokens == [64, 16]


async def test_a_cancel_between_prefill_done_and_decode_request_frees_both_workers() -> None:
    async with pair() as router:
        router.prefill(1, PROMPT, OPTIONS)
        await router.receive(Tag.PREFILL_DONE)
        for role in (Role.PREFILL, Role.DECODE):  # as a router does
            router.send(role, Cancel(1, ErrorCode.CANCELLED))
        await router.until_free(Role.PREFILL, Role.DECODE)
        # PREFILL_DONE may come before the last ACK, and then the CANCEL of the decode worker may
        # reach the prefill worker before that of the router: a transfer that broke.
        while not router.is_quiet:
            assert (await router.receive_any()).frame == Error(1, ErrorCode.TRANSFER_FAILED)


async def test_a_cancel_of_the_decode_worker_alone_reaches_the_prefill_worker() -> None:
    executor = GatedSteps()
    async with pair(prefill={"executor": executor, "max_ubatch_tokens": 16}) as router:
        executor.pass_one()
        router.prefill(1, PROMPT, OPTIONS)
        await router.until(lambda: router.loads_by_role[Role.DECODE].used > 0)
        router.send(Role.DECODE, Cancel(1, ErrorCode.CANCELLED))
        # To the router it is a transfer that broke: it has not asked this worker to cancel.
        assert (await router.receive(Tag.ERROR)).frame == Error(1, ErrorCode.TRANSFER_FAILED)
        executor.open()
        await router.until_free(Role.PREFILL, Role.DECODE)


async def test_an_id_used_twice_is_one_request() -> None:
    async with pair() as router:
        for _ in range(2):
            router.prefill(1, PROMPT, OPTIONS)
        await router.receive(Tag.PREFILL_DONE)
        await router.until_free(Role.PREFILL)
        assert router.is_quiet
