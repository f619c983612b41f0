"""The decode role on real sockets: whole transfers, tokens in order, ends that free everything."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.oracle import oracle
from tests.worker.scripted import (
    EPOCH,
    Clock,
    GatedSteps,
    ScriptedPrefill,
    ScriptedRouter,
    heard,
    pair,
    running,
    scripted_router,
)
from wire.errors import ErrorCode
from wire.frames import (
    AS_MANY_AS_FIT,
    Cancel,
    DecodeDone,
    DecodeRequest,
    Error,
    Role,
    Tag,
)
from wire.options import Options
from wire.payloads import (
    ErrorDetail,
    Logprobs,
    Usage,
    decode_map,
    decode_prefill_result,
    encode_map,
)
from wire.process.log_limit import AGAIN_S
from worker.engine.engine import Engine
from worker.engine.outputs import Failed, Token
from worker.executor.hash import EOS_TOKEN_IDS, create
from worker.roles.decode import DecodeRole, Generation
from worker.roles.results import Timing

PROMPT = [(11 * i) % 1000 for i in range(200)]
OPTIONS = Options(max_tokens=20, ignore_eos=True)


async def first_token(router: ScriptedRouter, request_id: int, prompt: list[int]) -> int:
    router.prefill(request_id, prompt, OPTIONS)
    message = await router.receive(Tag.PREFILL_DONE)
    return decode_prefill_result(message.body()).token_id


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 16), (16, 8), (8, 32)])
async def test_the_text_goes_on_where_the_prefill_worker_stopped(
    prefill_block: int, decode_block: int
) -> None:
    async with pair(
        prefill={"block_size": prefill_block, "max_ubatch_tokens": 48},
        decode={"block_size": decode_block},
    ) as router:
        expected = oracle(PROMPT, 20, OPTIONS)
        token = await first_token(router, 1, PROMPT)
        router.decode(1, [*PROMPT, token], 19, OPTIONS)
        assert [token, *await router.tokens(19)] == expected
        done = await router.receive(Tag.DECODE_DONE)
        assert done.frame == DecodeDone(1)
        usage = decode_map(Usage, done.body())
        assert (usage.finish_reason, usage.completion_tokens) == ("length", 20)
        assert (usage.kv_bytes, usage.kv_skipped_tokens) == (64 * len(PROMPT), 0)
        await router.until_free(Role.PREFILL, Role.DECODE)


async def test_choices_of_one_prompt_share_one_transfer_and_its_blocks() -> None:
    choices = {n: Options(max_tokens=20, ignore_eos=True, choice=n) for n in range(1, 5)}
    async with pair() as router:
        for choice, options in choices.items():
            router.prefill(choice, PROMPT, options)
        skipped: list[int] = []
        while len(skipped) < len(choices):
            message = await router.receive_any()
            choice = message.frame.request_id  # type: ignore[attr-defined]
            if message.tag is Tag.PREFILL_DONE:
                token = decode_prefill_result(message.body()).token_id
                router.decode(choice, [*PROMPT, token], 1, choices[choice])
            elif message.tag is Tag.DECODE_DONE:
                skipped.append(decode_map(Usage, message.body()).kv_skipped_tokens)
        assert sorted(skipped) == [0, 192, 192, 192]
        await router.until_free(Role.PREFILL, Role.DECODE)


async def test_a_prompt_held_completely_is_ready_before_its_first_token() -> None:
    prompt = PROMPT[:192]  # whole blocks only
    async with pair(prefill={"prefix_cache": False}) as router:
        for request_id in (1, 2):
            token = await first_token(router, request_id, prompt)
            router.decode(request_id, [*prompt, token], 5, OPTIONS)
            assert await router.tokens(5) == oracle(prompt, 6, OPTIONS)[1:]
            usage = decode_map(Usage, (await router.receive(Tag.DECODE_DONE)).body())
        assert (usage.kv_bytes, usage.kv_skipped_tokens) == (0, 192)
        await router.until_free(Role.PREFILL, Role.DECODE)


async def test_an_eos_token_ends_the_text_and_is_not_sent() -> None:
    options = Options(max_tokens=2000, logprobs=0)
    prompt = PROMPT
    expected = oracle(prompt, 2000, options)
    assert 2 < len(expected) < 2000
    async with pair() as router:
        router.prefill(1, prompt, options)
        token = decode_prefill_result((await router.receive(Tag.PREFILL_DONE)).body()).token_id
        router.decode(1, [*prompt, token], 1999, options)
        assert [token, *await router.tokens(len(expected) - 1)] == expected
        usage = decode_map(Usage, (await router.receive(Tag.DECODE_DONE)).body())
        assert (usage.finish_reason, usage.completion_tokens) == ("stop", len(expected))
        assert usage.stop_token_id in EOS_TOKEN_IDS and usage.stop_logprobs is not None


async def test_tokens_of_one_step_leave_in_one_message() -> None:
    executor = GatedSteps()
    async with pair(decode={"executor": executor}) as router:
        prompts = {i: [i] * 20 for i in range(1, 9)}
        tokens = {i: await first_token(router, i, prompt) for i, prompt in prompts.items()}
        await router.until_free(Role.PREFILL)  # so all KV is there
        executor.close()
        for i, prompt in prompts.items():
            router.decode(i, [*prompt, tokens[i]], 10, OPTIONS)
        await heard(router)
        executor.open()
        message = await router.receive(Tag.DECODE_TOKEN)
        while len(message.tokens) < len(prompts):
            message = await router.receive(Tag.DECODE_TOKEN)
        assert {request_id for request_id, _ in message.tokens} == set(prompts)
        for request_id in prompts:
            router.send(Role.DECODE, Cancel(request_id, ErrorCode.CANCELLED))
        await router.until_free(Role.DECODE)


async def test_logprobs_ride_with_their_tokens() -> None:
    options = Options(max_tokens=3, ignore_eos=True, logprobs=1)
    async with pair() as router:
        router.prefill(1, PROMPT, options)
        result = decode_prefill_result((await router.receive(Tag.PREFILL_DONE)).body())
        assert result.logprobs is not None
        router.decode(1, [*PROMPT, result.token_id], 2, options)
        message = await router.receive(Tag.DECODE_TOKEN)
        entries = decode_map(list[Logprobs | None], message.body())
        assert len(entries) == len(message.tokens) and entries[0] is not None


async def test_kv_that_never_comes_ends_the_request() -> None:
    async with scripted_router() as router, running(router, "decode", lease_s=0.2):
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, ErrorCode.TRANSFER_FAILED)
        assert decode_map(ErrorDetail, message.body()).stage == "transfer"


async def test_a_request_whose_kv_has_gone_ends_at_once() -> None:
    async with (
        scripted_router() as router,
        running(router, "decode") as process,
        ScriptedPrefill(router) as prefill,
    ):
        prefill.offer(1, PROMPT)
        await prefill.ack()
        prefill.cancel(1)
        await router.until_free(Role.DECODE)
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, ErrorCode.TRANSFER_FAILED)
        detail = decode_map(ErrorDetail, message.body())
        assert detail.stage == "transfer" and detail.message.endswith("its KV has gone")
        role = process.worker.role
        assert isinstance(role, DecodeRole)
        assert role.transfers.ends == {"failed": 1}, "it was counted when it was cancelled"


async def test_leases_are_as_long_as_the_router_says() -> None:
    async with scripted_router() as router:
        router.lease_ms = 45_000
        async with running(router, "decode") as process:
            role = process.worker.role
            assert isinstance(role, DecodeRole) and role.incoming.lease_s == 45.0


async def test_a_text_may_take_longer_than_a_lease() -> None:
    clock, executor = Clock(), GatedSteps()
    async with pair(decode={"clock": clock, "executor": executor}) as router:
        token = await first_token(router, 1, PROMPT)
        executor.pass_one()
        router.decode(1, [*PROMPT, token], 19, OPTIONS)
        second = await router.tokens(1)
        router.decode(2, [*PROMPT, token], 19, OPTIONS)  # no KV comes for it
        await heard(router)
        clock.now += 30
        assert (await router.receive(Tag.ERROR)).frame == Error(2, ErrorCode.TRANSFER_FAILED)
        executor.open()
        assert [token, *second, *await router.tokens(18)] == oracle(PROMPT, 20, OPTIONS)
        await router.receive(Tag.DECODE_DONE)


async def test_requests_that_fail_alike_are_one_line_and_their_number() -> None:
    clock = Clock()
    async with scripted_router() as router, running(router, "decode", clock=clock) as process:
        with capture_logs() as logs:
            for request_id in (1, 2, 3):
                router.decode(request_id, [*PROMPT, 5], 3, Options(deadline_ms=50))
            await heard(router)
            clock.now += 1
            for _ in range(3):
                await router.receive(Tag.ERROR)
            clock.now += AGAIN_S
            process.worker.role.tick(clock.now)
    said = [line for line in logs if line["event"] == "request failed"]
    numbers = [(line.get("request"), line.get("repeated")) for line in said]
    assert numbers == [(1, None), (None, 2)]
    assert {(line["stage"], line["code"]) for line in said} == {("transfer", "deadline_exceeded")}


def test_the_deadline_counts_from_the_request_not_from_the_end_of_its_transfer() -> None:
    now = [0.0]
    engine = Engine(create(), num_blocks=32, block_size=16, clock=lambda: now[0])
    engine.reserve(1, PROMPT)
    engine.step()
    now[0] = 1.0
    router: Any = None  # nothing is said to it
    options = Options(ignore_eos=True, deadline_ms=300)
    frame, tokens = DecodeRequest(1, 40), (*PROMPT, 5)
    generation = Generation(router, frame, tokens, options, 30.0, Timing(lambda: 0.8))
    assert not generation.is_overdue(1.0999) and generation.is_overdue(1.1)
    generation.begin(engine)
    assert [type(output) for output in engine.step()] == [Token]
    now[0] = 1.15
    (failed,) = engine.step()
    assert isinstance(failed, Failed) and failed.code is ErrorCode.DEADLINE_EXCEEDED


async def test_unclaimed_kv_is_freed_when_its_lease_ends() -> None:
    clock = Clock()
    async with pair(decode={"clock": clock}) as router:
        await first_token(router, 1, PROMPT)
        await router.until_free(Role.PREFILL)  # so it is complete
        clock.now += 30
        await router.until_free(Role.DECODE)
        token = await first_token(router, 2, PROMPT)
        router.decode(2, [*PROMPT, token], 1, OPTIONS)
        await router.tokens(1)


async def test_unclaimed_kv_of_a_lost_router_is_freed_at_once() -> None:
    lost, other = EPOCH << 32 | 1, (EPOCH + 1) << 32 | 1  # the upper half says whose they are
    prompts = {lost: [1] * 200, other: [2] * 200}  # 13 blocks each
    async with pair() as router:

        async def until_held(num_blocks: int) -> None:
            await router.until(
                lambda: (
                    (load := router.loads_by_role.get(Role.DECODE)) is not None
                    and load.used == num_blocks
                )
            )

        tokens = {name: await first_token(router, name, text) for name, text in prompts.items()}
        await router.until_free(Role.PREFILL)  # so both are complete
        await until_held(26)
        who = encode_map(ErrorDetail(message="who are you?"))
        router.send(Role.DECODE, Error(0, ErrorCode.UNKNOWN_PEER), who)
        await until_held(13)
        # It is known again: what it asks for now is taken.
        assert await first_token(router, lost + 1, prompts[lost])
        await until_held(26)
        router.decode(other, [*prompts[other], tokens[other]], 1, OPTIONS)
        assert await router.tokens(1) == oracle(prompts[other], 2, OPTIONS)[1:]


async def test_a_prompt_too_large_for_the_decode_worker_fails_on_both_sides() -> None:
    async with pair(decode={"num_blocks": 4}) as router:
        router.prefill(1, PROMPT, OPTIONS)
        while (message := (await router.receive_any())).tag is Tag.PREFILL_DONE:
            pass  # the first token may be drawn before the refusal is heard
        assert message.frame == Error(1, ErrorCode.OUT_OF_BLOCKS)
        await router.until_free(Role.PREFILL, Role.DECODE)


async def test_a_cancel_that_overtakes_the_offer_is_remembered() -> None:
    async with pair() as router:
        router.send(Role.DECODE, Cancel(1, ErrorCode.CANCELLED))
        router.send(Role.DECODE, Cancel(2, ErrorCode.CANCELLED))
        await router.until_free(Role.DECODE)  # a beat later both have been read
        router.prefill(1, PROMPT, OPTIONS)
        while (message := await router.receive_any()).tag is Tag.PREFILL_DONE:
            pass
        assert message.frame == Error(1, ErrorCode.TRANSFER_FAILED)
        await router.until_free(Role.PREFILL, Role.DECODE)


@pytest.mark.parametrize(
    ("tokens", "num_tokens"),
    [
        ([*PROMPT, 40_000], 3),  # not in the vocabulary
        ([*PROMPT, 5], 0),
    ],
)
async def test_a_continuation_of_something_else_is_refused(
    tokens: list[int], num_tokens: int
) -> None:
    async with pair() as router:
        await first_token(router, 1, PROMPT)
        router.decode(1, tokens, num_tokens, OPTIONS)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, ErrorCode.INVALID_REQUEST)
        assert decode_map(ErrorDetail, message.body()).stage == "decode"
        await router.until_free(Role.PREFILL, Role.DECODE)


@pytest.mark.parametrize(
    "tokens",
    [
        PROMPT,  # without the first token
        [*PROMPT[:-1], 999, 5],  # another prompt
        [],
    ],
)
async def test_kv_of_other_tokens_than_the_request_s_is_not_used(tokens: list[int]) -> None:
    """Whoever is at fault, the client is not; and the text is in no prefix cache."""
    async with pair() as router:
        await first_token(router, 1, PROMPT)
        await router.until_free(Role.PREFILL)
        router.decode(1, tokens, 3, OPTIONS)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, ErrorCode.TRANSFER_FAILED)
        assert decode_map(ErrorDetail, message.body()).stage == "transfer"
        await router.until_free(Role.PREFILL, Role.DECODE)
        load = router.loads_by_role[Role.DECODE]
        assert (load.free, load.cached) == (load.total, 0)


async def num_preempted(prompts: dict[int, list[int]]) -> int:
    """Have texts of 60 tokens generated, which must be right; return how often one gave way."""
    options = Options(max_tokens=60, ignore_eos=True)
    # Steps long enough for all to be generated at the same time, however late a prompt is read.
    slow = {"num_blocks": 22, "prefix_cache": False, "step_delay_s": 0.01}
    async with pair(decode=slow) as router:
        texts: dict[int, list[int]] = {}
        for i, prompt in prompts.items():
            texts[i] = oracle(prompt, 1, options)
            router.decode(i, [*prompt, *texts[i]], 59, options)
        for i, prompt in prompts.items():
            router.prefill(i, prompt, options)
        num_done = 0
        while num_done < len(prompts):
            message = await router.receive_any()
            assert message.tag in (Tag.PREFILL_DONE, Tag.DECODE_TOKEN, Tag.DECODE_DONE), message
            num_done += message.tag is Tag.DECODE_DONE
            if message.tag is Tag.DECODE_TOKEN:
                for request_id, token_id in message.tokens:
                    texts[request_id].append(token_id)
        for i, prompt in prompts.items():
            assert texts[i] == oracle(prompt, 60, options)
        await router.until_free(Role.DECODE)
        return router.loads_by_role[Role.DECODE].preemptions


async def test_a_text_that_is_preempted_goes_on_as_if_it_had_not_been() -> None:
    prompts = {i: [i] * 64 for i in range(1, 5)}
    while not await num_preempted(prompts):
        pass  # we stood still, so they had their turns one after the other


async def test_a_decode_request_that_is_cancelled_before_its_kv_is_forgotten() -> None:
    async with pair() as router:
        router.decode(1, [*PROMPT, 5], 3, OPTIONS)
        router.send(Role.DECODE, Cancel(1, ErrorCode.CANCELLED))
        token = await first_token(router, 2, PROMPT)
        router.decode(2, [*PROMPT, token], 3, OPTIONS)
        assert await router.tokens(3) == oracle(PROMPT, 4, OPTIONS)[1:]
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.PREFILL, Role.DECODE)
        assert router.is_quiet


async def test_an_id_used_twice_is_one_text() -> None:
    async with pair() as router:
        token = await first_token(router, 1, PROMPT)
        for _ in range(2):
            router.decode(1, [*PROMPT, token], 3, OPTIONS)
        assert len(await router.tokens(3)) == 3
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(Role.DECODE)


async def test_a_router_says_how_many_tokens_there_may_be() -> None:
    async with pair() as router:
        router.decode(1, [*PROMPT, 5], AS_MANY_AS_FIT, OPTIONS)
        assert (await router.receive(Tag.ERROR)).frame == Error(1, ErrorCode.PROTOCOL)
