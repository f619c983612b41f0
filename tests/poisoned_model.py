"""The example model with a bug: it cannot read token 13.

python -m router --model demo --executor tests.poisoned_model:create
"""

from tests import example_model
from worker.executor.functions import serve_functions

POISON = 13


def decode_step(kv: bytes, last_token_id: int, position: int) -> tuple[int, bytes]:
    if last_token_id == POISON:
        raise ZeroDivisionError(f"unlucky {last_token_id=}")
    return example_model.decode_step(kv, last_token_id, position)


def create(**settings: object) -> object:
    return serve_functions(
        example_model.prefill,
        decode_step,
        layout=example_model.LAYOUT,
        vocab_size=example_model.VOCAB,
        max_model_len=2048,
        settings=settings,
    )
