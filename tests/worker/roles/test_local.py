"""A decode worker that reads the prompt itself, on real sockets."""

from __future__ import annotations

import pytest

from tests.oracle import oracle
from tests.worker.scripted import GatedSteps, ScriptedRouter, heard, running, scripted_router
from wire.errors import ErrorCode
from wire.frames import NO_RANK, Cancel, DecodeDone, Error, PrefillRequest, Role, Tag
from wire.options import Options
from wire.payloads import (
    ErrorDetail,
    PrefillResult,
    Usage,
    decode_map,
    decode_prefill_result,
    encode_prompt,
)
from worker.executor.hash import EOS_TOKEN_IDS

PROMPT = [(11 * i) % 1000 for i in range(200)]
OPTIONS = Options(max_tokens=20, ignore_eos=True)


def ask(
    router: ScriptedRouter, request_id: int, prompt: list[int], options: Options, rank: int = 0
) -> None:
    frame = PrefillRequest(request_id, len(prompt), rank)
    router.send(Role.DECODE, frame, encode_prompt(prompt, options))


async def first(router: ScriptedRouter) -> PrefillResult:
    return decode_prefill_result((await router.receive(Tag.PREFILL_DONE)).body())


async def test_one_worker_reads_a_prompt_and_answers_it() -> None:
    async with scripted_router() as router, running(router, "decode"):
        await router.until_joined(Role.DECODE)
        for request_id, num_cached in ((1, 0), (2, 192)):
            ask(router, request_id, PROMPT, OPTIONS)
            result = await first(router)
            assert result.cached_tokens == num_cached
            assert [result.token_id, *await router.tokens(19)] == oracle(PROMPT, 20, OPTIONS)
            done = await router.receive(Tag.DECODE_DONE)
            assert done.frame == DecodeDone(request_id)
            usage = decode_map(Usage, done.body())
            assert (usage.finish_reason, usage.completion_tokens) == ("length", 20)
            assert (usage.kv_bytes, usage.kv_skipped_tokens) == (0, 0)
        await router.until_free(Role.DECODE)


async def test_the_answer_of_a_turn_is_cached_for_the_next() -> None:
    async with scripted_router() as router, running(router, "decode"):
        await router.until_joined(Role.DECODE)
        ask(router, 1, PROMPT, OPTIONS)
        answer = [(await first(router)).token_id, *await router.tokens(19)]
        await router.receive(Tag.DECODE_DONE)
        ask(router, 2, [*PROMPT, *answer, 7, 8, 9], OPTIONS)
        assert (await first(router)).cached_tokens == 208


@pytest.mark.parametrize("max_tokens", [1, 2000])
async def test_an_answer_may_end_with_its_first_token_or_at_eos(max_tokens: int) -> None:
    options = Options(max_tokens=max_tokens, logprobs=0)
    expected = oracle(PROMPT, max_tokens, options)
    async with scripted_router() as router, running(router, "decode"):
        await router.until_joined(Role.DECODE)
        ask(router, 1, PROMPT, options)
        result = await first(router)
        assert result.token_id == expected[0] and result.logprobs is not None
        if max_tokens == 1:
            assert result.finish_reason == "length"
        else:
            assert await router.tokens(len(expected) - 1) == expected[1:]
            usage = decode_map(Usage, (await router.receive(Tag.DECODE_DONE)).body())
            assert usage.finish_reason == "stop" and usage.completion_tokens == len(expected)
            assert usage.stop_token_id in EOS_TOKEN_IDS and usage.stop_logprobs is not None
        await router.until_free(Role.DECODE)
        assert router.is_quiet


async def test_a_later_attempt_goes_on_where_the_first_stopped() -> None:
    expected = oracle(PROMPT, 20, OPTIONS)
    options = Options(max_tokens=20, ignore_eos=True, generated_tokens=5)
    async with scripted_router() as router, running(router, "decode"):
        await router.until_joined(Role.DECODE)
        ask(router, 1, [*PROMPT, *expected[:5]], options)
        assert [(await first(router)).token_id, *await router.tokens(14)] == expected[5:]
        await router.receive(Tag.DECODE_DONE)


async def test_a_cancelled_request_frees_its_blocks() -> None:
    executor = GatedSteps()
    async with scripted_router() as router, running(router, "decode", executor=executor):
        await router.until_joined(Role.DECODE)
        executor.close()
        ask(router, 1, PROMPT, OPTIONS)
        await heard(router)
        router.send(Role.DECODE, Cancel(1, ErrorCode.CANCELLED))
        await heard(router)
        executor.open()
        await router.until_free(Role.DECODE)
        assert router.is_quiet


@pytest.mark.parametrize(
    ("rank", "options", "code"),
    [(1, OPTIONS, ErrorCode.NO_WORKER), (0, Options(), ErrorCode.PROTOCOL)],
)
async def test_a_prompt_for_an_unknown_worker_or_without_a_limit_is_refused(
    rank: int, options: Options, code: ErrorCode
) -> None:
    async with scripted_router() as router, running(router, "decode"):
        await router.until_joined(Role.DECODE)
        ask(router, 1, PROMPT, options, rank)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, code)
        assert decode_map(ErrorDetail, message.body()).stage == "prefill"
        await router.until_free(Role.DECODE)


async def test_a_prompt_for_no_worker_ends_with_its_first_token() -> None:
    async with scripted_router() as router, running(router, "any") as process:
        frame = PrefillRequest(1, len(PROMPT), NO_RANK)
        router.send(Role.ANY, frame, encode_prompt(PROMPT, OPTIONS))
        result = await first(router)
        assert [result.token_id] == oracle(PROMPT, 1, OPTIONS)
        assert result.finish_reason == "length"
        await router.until_free(Role.ANY)
        assert router.is_quiet and not process.worker.role.num_unfinished
