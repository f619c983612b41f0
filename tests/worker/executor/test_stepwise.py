"""A model that knows one sequence at a time, in the engine: chunks, cached prefixes, preemption."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.worker.executor.byte_model import LAYOUT, decode_step, prefill
from tests.worker.executor.forward_pair import ForwardModel, pair
from wire.errors import ErrorCode
from wire.options import Options
from worker.compute.shared_memory import Bytes
from worker.engine.engine import Engine
from worker.engine.instrumented import Direct
from worker.engine.outputs import Failed, Token
from worker.engine.sequence import Sequence
from worker.executor.contract import SequenceFailed
from worker.executor.forward import Float32, GetKV
from worker.executor.functions import serve_functions
from worker.executor.stepwise import Answer, StepwiseExecutor, describe


def functions() -> StepwiseExecutor:
    return serve_functions(prefill, decode_step, layout=LAYOUT, vocab_size=100)


def texts(executor: StepwiseExecutor, prompts: list[list[int]], **settings: int) -> list[list[int]]:
    engine = Engine(executor, **{"num_blocks": 64, "block_size": 4} | settings)  # type: ignore[arg-type]
    generated, failed = generate(engine, prompts)
    assert not failed
    if "num_blocks" in settings:
        assert engine.load().preemptions
    return generated


def generate(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[Failed]]:
    """Return the text of each prompt, and who failed."""
    generated: list[list[int]] = [[] for _ in prompts]
    failed: list[Failed] = []
    for index, prompt in enumerate(prompts):
        engine.add(Sequence(index, prompt, Options(), 9))
    while engine.has_work():
        for output in engine.step():
            if isinstance(output, Token):
                generated[output.request_id].append(output.token_id)
            elif isinstance(output, Failed):
                failed.append(output)
        engine.check()
    return generated, failed


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


def raising(*_: object) -> Any:
    raise KeyError("no such thing")


POISON = 77
DECODE_FAULTS: dict[str, tuple[Callable[[bytes, int, int], Any], str]] = {
    "raises": (raising, "KeyError: 'no such thing'"),
    "id": (lambda kv, _, __: (100, kv + bytes(4)), "ValueError: the model chose token 100, not"),
    "no id": (lambda kv, _, __: (None, kv + bytes(4)), "TypeError: the model chose a NoneType"),
    "no pair": (lambda *_: 5, "TypeError: cannot unpack"),
    "kv": (lambda kv, _, __: (5, kv), "ValueError: DecodeStepFn returned"),
}


@pytest.mark.parametrize("fault", DECODE_FAULTS)
@pytest.mark.parametrize("max_ubatch_tokens", [3, 512])
def test_a_fault_of_the_model_ends_one_sequence(fault: str, max_ubatch_tokens: int) -> None:
    """Of the first sequence of a batch and of its last, in the prompt's last token."""
    broken, message = DECODE_FAULTS[fault]

    def poisoned(kv: bytes, last_token_id: int, position: int) -> Any:
        step = broken if last_token_id == POISON else decode_step
        return step(kv, last_token_id, position)

    executor = serve_functions(prefill, poisoned, layout=LAYOUT, vocab_size=100)
    engine = Engine(executor, num_blocks=64, block_size=4, max_ubatch_tokens=max_ubatch_tokens)
    prompts = [[1, 2, POISON], *PROMPTS, [3, 4, POISON]]
    generated, failed = generate(engine, prompts)
    assert generated == [[], *ALONE[functions], []]
    assert {output.request_id for output in failed} == {0, len(prompts) - 1}
    for output in failed:
        assert output.code is ErrorCode.MODEL_FAILED and output.message.startswith(message)
    assert engine.load().used == 0


def test_a_prompt_that_cannot_be_read_is_the_cause() -> None:
    executor = serve_functions(raising, decode_step, layout=LAYOUT, vocab_size=100)
    direct = Direct(executor, executor.allocate(8, 4))
    with pytest.raises(SequenceFailed, match="KeyError: 'no such thing'") as caught:
        direct.batch_prefill([[1], [2]])
    assert caught.value.index == 0 and isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_say_nothing_are_refused(value: float) -> None:
    class Numb(ForwardModel):
        def forward(self, token_id: int, get_kv: GetKV) -> tuple[Float32, GetKV]:
            logits, row = super().forward(token_id, get_kv)
            return logits if token_id != 7 else np.full_like(logits, value), row

    executor = pair(model=Numb())
    direct = Direct(executor, executor.allocate(8, 4))
    with pytest.raises(SequenceFailed, match=f"the highest of the model's logits is {value}"):
        direct.batch_prefill([[1, 2], [3, 7]])


class Undecided:
    """Says what comes next after small tokens, and leaves it to us after others."""

    def prefill(self, token_ids: npt.NDArray[np.int32]) -> tuple[Bytes, Answer | None]:
        return np.zeros((len(token_ids), 4), np.uint8), None

    def step(self, kv: Bytes, token_id: int, position: int) -> tuple[Bytes, Answer]:
        logits = np.zeros(100, np.float64)
        logits[token_id + 1] = 1.0
        return np.zeros(4, np.uint8), np.int64(9) if token_id < 5 else logits  # type: ignore[return-value]


def test_ids_and_logits_may_come_in_one_step() -> None:
    info = describe({}, layout=LAYOUT, vocab_size=100, eos_token_ids=(), max_model_len=64)
    executor = StepwiseExecutor(Undecided(), info)
    direct = Direct(executor, executor.allocate(8, 4))
    sequences = direct.batch_prefill([[1], [20], [2], [30]])
    assert [sequence.token_ids[-1] for sequence in sequences] == [9, 21, 9, 31]


def test_longer_sequences_than_the_model_has_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len is 11, the model allows 1 to 10"):
        describe(
            {"max_model_len": 11},
            layout=LAYOUT,
            vocab_size=5,
            eos_token_ids=[],
            max_model_len=10,
        )
