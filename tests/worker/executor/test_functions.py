"""Two functions of bytes are served; what they may not do is named."""

import struct

import pytest

from tests.worker.executor.byte_model import LAYOUT, decode_step, prefill
from worker.engine.instrumented import Direct
from worker.executor.contract import SequenceFailed
from worker.executor.functions import DecodeStepFn, PrefillFn, serve_functions
from worker.executor.stepwise import StepwiseExecutor


def executor_of(
    prefill: PrefillFn = prefill, decode_step: DecodeStepFn = decode_step, **extra: object
) -> StepwiseExecutor:
    return serve_functions(prefill, decode_step, layout=LAYOUT, vocab_size=100, **extra)  # type: ignore[arg-type]


def first_tokens(executor: StepwiseExecutor, prompt: list[int]) -> list[int]:
    direct = Direct(executor, executor.allocate(8, 4))
    sequence = direct.prefill(prompt)
    direct.decode(sequence)
    return sequence.token_ids[len(prompt) :]


def test_the_first_token_is_what_decode_step_says_of_the_last_prompt_token() -> None:
    assert first_tokens(executor_of(), [1, 2, 3]) == [6, 12]


def test_the_first_token_may_come_from_the_activation() -> None:
    executor = executor_of(first_token=lambda activation: 40 + struct.unpack("<I", activation)[0])
    assert first_tokens(executor, [1, 2, 3]) == [43, 49]


@pytest.mark.parametrize("num_bytes", [0, 11, 13, 16])
def test_kv_of_another_size_than_the_layout_s_is_refused(num_bytes: int) -> None:
    expected = (
        f"PrefillFn returned {num_bytes} bytes of KV for 3 tokens, not 12: .* 4 bytes a token"
    )
    with pytest.raises(SequenceFailed, match=expected):
        first_tokens(executor_of(prefill=lambda ids, seq_len: (b"", bytes(num_bytes))), [1, 2, 3])


def test_a_step_may_not_change_what_other_sequences_share() -> None:
    def changing(kv: bytes, last_token_id: int, position: int) -> tuple[int, bytes]:
        return 1, bytes(len(kv) + 4)

    with pytest.raises(SequenceFailed, match="changed the KV of earlier tokens"):
        first_tokens(executor_of(decode_step=changing), [1, 2, 3])
