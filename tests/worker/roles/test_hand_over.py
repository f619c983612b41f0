"""An any worker and a decode worker: each prefills, generates, and sends its KV to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.oracle import oracle
from tests.wire.process.key_files import write
from tests.worker.scripted import (
    PATIENCE_S,
    GatedSteps,
    Process,
    ScriptedDecode,
    ScriptedPrefill,
    ScriptedRouter,
    running,
    scripted_router,
)
from wire.errors import ErrorCode
from wire.frames import Cancel, DecodeRequest, Error, Peers, PrefillRequest, Role, Tag
from wire.options import Options
from wire.payloads import (
    ErrorDetail,
    PeerDetail,
    PrefillResult,
    Usage,
    decode_map,
    decode_prefill_result,
    encode_continuation,
    encode_map,
    encode_prompt,
)
from wire.process.keys import Keys
from worker.roles.decode import DecodeRole

PROMPT = [(11 * i) % 1000 for i in range(200)]
OPTIONS = Options(max_tokens=60, ignore_eos=True)
ANSWER = oracle(PROMPT, 60, OPTIONS)
RANKS = {Role.ANY: 0, Role.DECODE: 1}  # of one number space
OTHER = {Role.ANY: Role.DECODE, Role.DECODE: Role.ANY}


def announce(router: ScriptedRouter, to: Role, *others: PeerDetail) -> None:
    """List both workers, and `others`, to one of them."""
    rows = [
        PeerDetail(
            rank=RANKS[role],
            epoch=1,
            role=role.name.lower(),
            kv_endpoint=router.details[role].kv_endpoint,
            kv_unasked_bytes=router.details[role].kv_unasked_bytes,
        )
        for role in RANKS
        if role in router.details
    ]
    rows += others
    router.send(to, Peers(router.epoch, len(rows)), encode_map(rows))


@asynccontextmanager
async def two_workers(
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
    keys: Keys | None = None,
) -> AsyncIterator[tuple[ScriptedRouter, dict[Role, Process]]]:
    async with (
        scripted_router(keys) as router,
        running(router, "any", **(first or {})) as one,
        running(router, "decode", rank=1, **(second or {})) as two,
    ):
        for role in RANKS:
            announce(router, role)
        yield router, {Role.ANY: one, Role.DECODE: two}


def ask(
    router: ScriptedRouter, to: Role, request_id: int, prompt: list[int], options: Options, of: Role
) -> None:
    """Send a prompt to a worker; `of` generates the answer."""
    frame = PrefillRequest(request_id, len(prompt), RANKS[of])
    router.send(to, frame, encode_prompt(prompt, options))


def go_on(
    router: ScriptedRouter, to: Role, request_id: int, tokens: list[int], options: Options
) -> None:
    left = OPTIONS.max_tokens - 1 - options.generated_tokens  # type: ignore[operator]
    frame = DecodeRequest(request_id, left)
    router.send(to, frame, encode_continuation(tokens, options))


async def first(router: ScriptedRouter) -> PrefillResult:
    return decode_prefill_result((await router.receive(Tag.PREFILL_DONE)).body())


def role_of(process: Process) -> DecodeRole:
    assert isinstance(process.worker.role, DecodeRole)
    return process.worker.role


async def hand_over(router: ScriptedRouter, to: Role, tokens: list[int], num_done: int) -> None:
    """Let the worker `to` go on as request 2 after `num_done` tokens of the answer."""
    options = Options(max_tokens=60, ignore_eos=True, generated_tokens=num_done)
    result = await first(router)
    assert result.cached_tokens == (len(tokens) - 1) // 16 * 16, "the answer's blocks are cached"
    assert result.token_id == ANSWER[num_done]
    go_on(router, to, 2, [*tokens, result.token_id], options)
    assert await router.tokens(59 - num_done) == ANSWER[num_done + 1 :]
    usage = decode_map(Usage, (await router.receive(Tag.DECODE_DONE)).body())
    assert usage.kv_bytes > 0


async def begin(router: ScriptedRouter, at: Role, executor: GatedSteps, *, alone: bool) -> None:
    """Let a worker generate the first 30 tokens as request 1, alone or from the other's KV."""
    executor.close()
    ask(router, at if alone else OTHER[at], 1, PROMPT, OPTIONS, at)
    if alone:
        executor.pass_one()
    assert (await first(router)).token_id == ANSWER[0]
    if not alone:
        go_on(router, at, 1, [*PROMPT, ANSWER[0]], OPTIONS)
    for expected in ANSWER[1:30]:
        executor.pass_one()
        assert await router.tokens(1) == [expected]


@pytest.mark.parametrize("reader", RANKS)
@pytest.mark.parametrize("settings", [{}, {"speculate": "ngram:4", "kv_unasked_bytes": 0}])
async def test_each_worker_prefills_for_the_other(reader: Role, settings: dict[str, Any]) -> None:
    async with two_workers(settings, settings) as (router, workers):
        ask(router, reader, 1, PROMPT, OPTIONS, OTHER[reader])
        token_id = (await first(router)).token_id
        go_on(router, OTHER[reader], 1, [*PROMPT, token_id], OPTIONS)
        assert [token_id, *await router.tokens(59)] == ANSWER
        usage = decode_map(Usage, (await router.receive(Tag.DECODE_DONE)).body())
        assert usage.kv_bytes == 64 * len(PROMPT)
        await router.until_free(*RANKS)
        for process in workers.values():
            assert role_of(process).transfers.ends == {"done": 1}, "both directions are counted"


@pytest.mark.parametrize("reader", RANKS)
async def test_with_keys_each_worker_is_known_by_its_role_and_rank(
    reader: Role, tmp_path: Path
) -> None:
    write(tmp_path, "router", "any-0", "decode-1")
    settings = {"keys": tmp_path, "kv_shared_memory": "off"}
    async with two_workers(settings, settings, Keys(tmp_path, "router")) as (router, _):
        ask(router, reader, 1, PROMPT, OPTIONS, OTHER[reader])
        token_id = (await first(router)).token_id
        go_on(router, OTHER[reader], 1, [*PROMPT, token_id], OPTIONS)
        assert [token_id, *await router.tokens(59)] == ANSWER


async def test_kv_crosses_while_both_generate() -> None:
    prompts = {n: [n, *PROMPT] for n in range(1, 9)}
    readers = {n: Role.ANY if n % 2 else Role.DECODE for n in prompts}
    texts: dict[int, list[int]] = {}
    async with two_workers() as (router, _):
        for n, prompt in prompts.items():
            ask(router, readers[n], n, prompt, OPTIONS, readers[n] if n > 6 else OTHER[readers[n]])
        num_done = 0
        while num_done < len(prompts):
            message = await router.receive_any()
            for n, token_id in message.tokens:
                texts[n].append(token_id)
            if message.tag is Tag.PREFILL_DONE:
                n = message.frame.request_id  # type: ignore[attr-defined]
                texts[n] = [decode_prefill_result(message.body()).token_id]
                if n <= 6:
                    go_on(router, OTHER[readers[n]], n, [*prompts[n], *texts[n]], OPTIONS)
            num_done += message.tag is Tag.DECODE_DONE
        await router.until_free(*RANKS)
    assert texts == {n: oracle(prompt, 60, OPTIONS) for n, prompt in prompts.items()}


async def test_workers_full_of_kv_for_each_other_do_not_wait_for_each_other() -> None:
    """Four prompts fill the blocks of a worker twice."""
    room = {"num_blocks": 16}
    prompts = {n: [n, *PROMPT[:100]] for n in range(1, 9)}
    readers = {n: Role.ANY if n % 2 else Role.DECODE for n in prompts}
    async with two_workers(room, room) as (router, _):
        for n, prompt in prompts.items():
            ask(router, readers[n], n, prompt, OPTIONS, OTHER[readers[n]])
        for _ in prompts:
            message = await router.receive_any()
            while message.tag is not Tag.PREFILL_DONE:
                message = await router.receive_any()
            n = message.frame.request_id  # type: ignore[attr-defined]
            token_id = decode_prefill_result(message.body()).token_id
            options = Options(max_tokens=2, ignore_eos=True)
            frame = DecodeRequest(n, 1)
            payload = encode_continuation([*prompts[n], token_id], options)
            router.send(OTHER[readers[n]], frame, payload)
        await router.until_free(*RANKS)


@pytest.mark.parametrize("at", RANKS)
@pytest.mark.parametrize("alone", [True, False])
async def test_a_sequence_moves_with_the_kv_of_its_answer(at: Role, *, alone: bool) -> None:
    executor = GatedSteps()
    settings = {at: {"executor": executor}}
    async with two_workers(settings.get(Role.ANY), settings.get(Role.DECODE)) as (router, workers):
        await begin(router, at, executor, alone=alone)
        tokens = [*PROMPT, *ANSWER[:30]]
        router.send(at, Cancel(1, ErrorCode.CANCELLED))
        options = Options(max_tokens=60, ignore_eos=True, generated_tokens=30)
        ask(router, at, 2, tokens, options, OTHER[at])
        await router.until(lambda: role_of(workers[at]).request_ids == {2})
        executor.open()
        await hand_over(router, OTHER[at], tokens, 30)
        await router.until_free(*RANKS)


@pytest.mark.parametrize("at", RANKS)
async def test_a_worker_that_drains_hands_its_sequences_over(at: Role) -> None:
    executor = GatedSteps()
    settings = {at: {"executor": executor}}
    async with two_workers(settings.get(Role.ANY), settings.get(Role.DECODE)) as (router, workers):
        router.answers_drains = False
        await begin(router, at, executor, alone=True)
        workers[at].stop.set()
        await router.until(lambda: len(router.drains) == 1)
        tokens = [*PROMPT, *ANSWER[:30]]
        router.send(at, Cancel(1, ErrorCode.CANCELLED))
        options = Options(max_tokens=60, ignore_eos=True, generated_tokens=30)
        ask(router, at, 2, tokens, options, OTHER[at])
        router.send(at, router.drains[0])  # it waits for the transfer all the same
        await router.until(lambda: workers[at].worker.routers[0].is_drained)
        executor.open()
        await hand_over(router, OTHER[at], tokens, 30)
        assert await asyncio.wait_for(asyncio.shield(workers[at].task), PATIENCE_S) == 0
        router.answers_drains = True
        await router.until_free(OTHER[at])


@pytest.mark.parametrize("cancelled", [1, 2])
async def test_a_cancel_ends_one_half_and_not_the_other(cancelled: int) -> None:
    executor = GatedSteps()
    async with two_workers({"executor": executor}) as (router, workers):
        await begin(router, Role.ANY, executor, alone=True)
        ask(router, Role.ANY, 2, PROMPT, OPTIONS, Role.DECODE)
        router.send(Role.ANY, Cancel(cancelled, ErrorCode.CANCELLED))
        await router.until(lambda: role_of(workers[Role.ANY]).request_ids == {3 - cancelled})
        executor.open()
        if cancelled == 1:
            token_id = (await first(router)).token_id
            go_on(router, Role.DECODE, 2, [*PROMPT, token_id], OPTIONS)
            assert [token_id, *await router.tokens(59)] == ANSWER
        else:
            assert await router.tokens(30) == ANSWER[30:]
        await router.receive(Tag.DECODE_DONE)
        await router.until_free(*RANKS)
        assert router.is_quiet


async def test_kv_is_not_offered_back_under_the_id_of_the_request_that_sends_it() -> None:
    """A transfer of that id, once it failed, would free the blocks that are being sent."""
    async with (
        scripted_router() as router,
        ScriptedDecode() as peer,
        running(router, "decode", rank=1),
        ScriptedPrefill(router, b"any-5-1") as back,
    ):
        announce(router, Role.DECODE, PeerDetail(rank=5, epoch=1, kv_endpoint=peer.endpoint))
        frame = PrefillRequest(1, len(PROMPT), 5)
        router.send(Role.DECODE, frame, encode_prompt(PROMPT, OPTIONS))
        await peer.offered(1)
        back.offer(1, PROMPT)
        assert await back.error() == (1, ErrorCode.UNKNOWN_REQUEST)
        back.offer(2, PROMPT)
        assert (await back.ack())[0].request_id == 2, "an any worker may offer KV"
        back.cancel(2)
        peer.ack(1, 0, 64 * len(PROMPT))
        await peer.segment(1)
        peer.ack(1, 64 * len(PROMPT), 64 * len(PROMPT), ready=True)
        await router.receive(Tag.PREFILL_DONE)
        await router.until_free(Role.DECODE)


async def test_a_lost_router_takes_its_transfers_along() -> None:
    async with (
        scripted_router() as router,
        ScriptedDecode() as peer,
        running(router, "any"),
    ):
        announce(router, Role.ANY, PeerDetail(rank=5, epoch=1, kv_endpoint=peer.endpoint))
        frame = PrefillRequest(1, len(PROMPT), 5)
        router.send(Role.ANY, frame, encode_prompt(PROMPT, OPTIONS))
        await peer.offered(1)
        who = encode_map(ErrorDetail(message="who are you?"))
        router.send(Role.ANY, Error(0, ErrorCode.UNKNOWN_PEER), who)
        assert (await peer.receive()).frame == Cancel(1, ErrorCode.CANCELLED)
        await router.until_free(Role.ANY)
