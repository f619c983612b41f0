"""The example model with a bug: it cannot read token 13.

python -m router --model demo --executor tests.poisoned_model:create
"""

from scripts.examples import own_model
from worker.executor.functions import serve_functions

POISON = 13


def decode_step(kv: bytes, last_token_id: int, position: int) -> tuple[int, bytes]:
    if last_token_id == POISON:
        raise ZeroDivisionError(f"unlucky {last_token_id=}")
    return own_model.decode_step(kv, last_token_id, position)


def create(**settings: object) -> object:
    return serve_functions(
        own_model.prefill,
        decode_step,
        layout=own_model.LAYOUT,
        vocab_size=own_model.VOCAB,
        max_model_len=2048,
        settings=settings,
    )
