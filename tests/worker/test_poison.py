"""A sequence that cannot be computed ends alone: neighbours keep their text, blocks come back."""

import random

import pytest

from tests.oracle import oracle
from tests.worker.engine.hashed import GREEDY, run
from tests.worker.poisoned import POISON, PoisonedExecutor
from tests.worker.scripted import pair
from wire.errors import ErrorCode
from wire.frames import Error, Role, Tag
from wire.options import Options
from wire.payloads import ErrorDetail, decode_map, decode_prefill_result
from worker.engine.engine import Engine
from worker.engine.outputs import Failed, Output, Reserved, Started, Token
from worker.engine.sequence import Sequence

GREEDY_9 = Options(ignore_eos=True, max_tokens=9)
PROMPTS = [[seed + 20, 5, 6, 7, 8, seed + 30] for seed in range(4)]
POISONED = [20, 5, 6, 7, 8, POISON, 9, 10]  # begins like the first of them


def engine_of(place: str = "forward", **settings: object) -> Engine:
    return Engine(PoisonedExecutor(place), **{"num_blocks": 64, "block_size": 4} | settings)  # type: ignore[arg-type]


def text(outputs: list[Output], request_id: int) -> list[int]:
    tokens = [it for it in outputs if isinstance(it, Token) and it.request_id == request_id]
    assert [token.index for token in tokens] == list(range(len(tokens)))
    return [token.token_id for token in tokens]


def ends_badly(prompt: list[int], num_tokens: int) -> bool:
    """Whether the model comes upon the poison: a token it draws last it never reads."""
    return POISON in [*prompt, *oracle(prompt, num_tokens, GREEDY)[:-1]]


@pytest.mark.parametrize("place", ["forward", "sample"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_ubatch_tokens": 5},
        {"prefer_pure_decode": True},
        {"speculate": "ngram:4"},
        {"num_blocks": 11},
        {"num_blocks": 11, "swap_bytes": 1 << 20},
        {"prefix_cache": False},
    ],
)
def test_neighbours_keep_their_text(place: str, settings: dict[str, object]) -> None:
    engine = engine_of(place, **settings)
    engine.swap.costs.copy_bytes_per_s = 1e15  # swap rather than compute again
    outputs: list[Output] = []
    for request_id, prompt in enumerate(PROMPTS):
        engine.add(Sequence(request_id, prompt, GREEDY, 12))
        engine.add(Sequence(100 + request_id, [*POISONED, request_id], GREEDY, 12))
        outputs += engine.step()
    outputs += run(engine)
    for request_id, prompt in enumerate(PROMPTS):
        assert not ends_badly(prompt, 12)
        assert text(outputs, request_id) == oracle(prompt, 12, GREEDY)
    failures = [output for output in outputs if isinstance(output, Failed)]
    assert sorted(failure.request_id for failure in failures) == [100, 101, 102, 103]
    assert {failure.code for failure in failures} == {ErrorCode.MODEL_FAILED}
    assert {failure.message for failure in failures} == {"token 13 is too much"}
    stats = engine.stats()
    assert (stats.blocks_used, stats.num_swapped, engine.num_running) == (0, 0, 0)
    assert (stats.counters.finished, stats.counters.failed) == (4, 4)


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_of_which_some_come_upon_it(seed: int) -> None:
    rng = random.Random(seed)
    engine = engine_of(num_blocks=40, max_ubatch_tokens=9, speculate="ngram:3")
    prompts = [rng.choices([*range(8, 15)], k=rng.randint(1, 12)) for _ in range(12)]
    for request_id, prompt in enumerate(prompts):
        engine.add(Sequence(request_id, prompt, GREEDY, 9))
    outputs = run(engine)
    failed = {output.request_id for output in outputs if isinstance(output, Failed)}
    assert failed == {index for index, prompt in enumerate(prompts) if ends_badly(prompt, 9)}
    assert 0 < len(failed) < len(prompts)
    for request_id in set(range(len(prompts))) - failed:
        assert text(outputs, request_id) == oracle(prompts[request_id], 9, GREEDY)
    assert engine.load().used == 0


def test_a_transfer_keeps_its_blocks_until_the_role_says_so() -> None:
    engine = engine_of(max_ubatch_tokens=4)
    engine.add(Sequence(1, POISONED, GREEDY, 9, transfer=True))
    outputs = run(engine)
    assert isinstance(outputs[0], Started) and isinstance(outputs[-1], Failed)
    assert engine.load().used == 2, "the first chunk may be on its way this moment"
    engine.cancel(1)
    engine.check()
    assert engine.load().used == 0 and engine.num_running == 0


def test_a_continuation_fails_and_a_reservation_beside_it_does_not() -> None:
    engine = engine_of()
    for request_id in (1, 2):
        engine.reserve(request_id, PROMPTS[request_id])
    assert [type(output) for output in run(engine)] == [Reserved, Reserved]
    engine.begin_decode(1, [*PROMPTS[1], POISON], GREEDY, 5)
    (failed,) = run(engine)
    assert isinstance(failed, Failed) and failed.request_id == 1
    assert engine.num_running == 1
    engine.cancel(2)
    assert engine.load().used == 0


# In a program, and over sockets.


LONG = [(11 * i) % 1000 + 20 for i in range(200)]


@pytest.mark.parametrize(
    "prompt",
    [[POISON, *LONG], [*LONG[:150], POISON, *LONG[150:]], [*LONG, POISON]],
    ids=["first chunk", "a later one", "the last"],
)
async def test_a_prompt_that_fails_while_it_is_handed_over(prompt: list[int]) -> None:
    prefill = {"executor": PoisonedExecutor(), "max_ubatch_tokens": 32}
    async with pair(prefill=prefill) as router:
        router.prefill(1, prompt, GREEDY_9)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, ErrorCode.MODEL_FAILED)
        detail = decode_map(ErrorDetail, message.body())
        assert detail.stage == "prefill"
        assert "the worker's log" in detail.message and "13" not in detail.message
        await router.until_free(Role.PREFILL, Role.DECODE)
        router.prefill(2, LONG, GREEDY_9)
        token = decode_prefill_result((await router.receive(Tag.PREFILL_DONE)).body()).token_id
        router.decode(2, [*LONG, token], 8, GREEDY_9)
        assert [token, *await router.tokens(8)] == oracle(LONG, 9, GREEDY_9)
        await router.until_free(Role.PREFILL, Role.DECODE)


async def test_a_text_that_fails_at_the_decode_worker() -> None:
    async with pair(decode={"executor": PoisonedExecutor()}) as router:
        for request_id in (1, 2):
            router.prefill(request_id, LONG, GREEDY_9)
            message = await router.receive(Tag.PREFILL_DONE)
        token = decode_prefill_result(message.body()).token_id
        router.decode(1, [*LONG, POISON], 8, GREEDY_9)
        message = await router.receive(Tag.ERROR)
        assert message.frame == Error(1, ErrorCode.MODEL_FAILED)
        assert decode_map(ErrorDetail, message.body()).stage == "decode"
        router.decode(2, [*LONG, token], 8, GREEDY_9)
        assert [token, *await router.tokens(8)] == oracle(LONG, 9, GREEDY_9)
        await router.until_free(Role.PREFILL, Role.DECODE)
