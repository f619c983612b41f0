"""A model that knows one sequence at a time, in the engine: chunks, cached prefixes, preemption."""

import random
from collections.abc import Callable

import pytest

from tests.worker.executor.test_forward import pair
from tests.worker.executor.test_functions import LAYOUT, decode_step, prefill
from wire.options import Options
from wire.payloads import KVLayout
from worker.engine import Engine
from worker.executor.functions import serve_functions
from worker.executor.stepwise import StepwiseExecutor, describe
from worker.outputs import Token
from worker.sequence import Sequence


def functions() -> StepwiseExecutor:
    return serve_functions(prefill, decode_step, layout=LAYOUT, vocab_size=100)


def texts(executor: StepwiseExecutor, prompts: list[list[int]], **settings: int) -> list[list[int]]:
    engine = Engine(executor, **{"num_blocks": 64, "block_size": 4} | settings)  # type: ignore[arg-type]
    generated: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add(Sequence(index, prompt, Options(), 9))
    while engine.has_work():
        for output in engine.step():
            if isinstance(output, Token):
                generated[output.request_id].append(output.token_id)
        engine.check()
    if "num_blocks" in settings:
        assert engine.load().preemptions
    return generated


PROMPTS = [random.Random(seed).choices(range(50), k=11) for seed in range(3)]
ALONE = {make: [texts(make(), [each])[0] for each in PROMPTS] for make in (functions, pair)}


@pytest.mark.parametrize("make", [functions, pair])
@pytest.mark.parametrize("max_ubatch_tokens", [3, 5, 512])
def test_neither_chunks_nor_batch_mates_change_the_text(
    make: Callable[[], StepwiseExecutor], max_ubatch_tokens: int
) -> None:
    assert texts(make(), PROMPTS, max_ubatch_tokens=max_ubatch_tokens) == ALONE[make]


@pytest.mark.parametrize("make", [functions, pair])
def test_a_preempted_sequence_goes_on_the_same(make: Callable[[], StepwiseExecutor]) -> None:
    assert texts(make(), PROMPTS, num_blocks=11) == ALONE[make]


@pytest.mark.parametrize("make", [functions, pair])
def test_a_cached_prefix_is_not_read_again(make: Callable[[], StepwiseExecutor]) -> None:
    engine = Engine(make(), num_blocks=64, block_size=4)
    generated: dict[int, list[int]] = {0: [], 1: []}
    for request_id in generated:
        sequence = Sequence(request_id, PROMPTS[0], Options(), 9)
        engine.add(sequence)
        while engine.has_work():
            for output in engine.step():
                if isinstance(output, Token):
                    generated[output.request_id].append(output.token_id)
    assert sequence.num_cached_tokens == 8
    assert generated[0] == generated[1] == ALONE[make][0]


def test_settings_name_the_model() -> None:
    settings = {"model_name": "mine", "fingerprint": "f", "max_model_len": 9, "device": "cpu"}
    info = describe(settings, layout=LAYOUT, vocab_size=5, eos_token_ids=[1], max_model_len=10)
    assert (info.name, info.fingerprint, info.max_model_len) == ("mine", "f", 9)
    assert info.eos_token_ids == {1}


def test_longer_sequences_than_the_model_has_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len is 11, the model allows 1 to 10"):
        describe(
            {"max_model_len": 11},
            layout=LAYOUT,
            vocab_size=5,
            eos_token_ids=[],
            max_model_len=10,
        )


def test_a_layout_that_peers_would_refuse_is_refused_here() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=5000, dtype="uint8")
    with pytest.raises(ValueError, match="head_dim"):
        describe({}, layout=layout, vocab_size=5, eos_token_ids=[], max_model_len=10)
