"""Serves a custom model given as two functions on bytes: `PrefillFn`, `DecodeStepFn` (seed 000).

    prefill(token_ids, seq_len) -> (activation, kv)
    decode_step(kv, last_token_id, position) -> (next_token_id, updated_kv)

`token_ids` are u32 little-endian, as on the wire.  `kv` is the KV of the earlier tokens, one after
another, `layout.token_bytes` each.  The KV of a token must depend only on that token and those
before it, and never change, because sequences with the same prefix share blocks.  `updated_kv` is
`kv` followed by the KV of the token at `position`.  Sizes are checked at every call.

The first token is `first_token(activation)`, or the result of `decode_step` for the last prompt
token.  The functions choose tokens themselves, so of a request's options only limits and stop
tokens have an effect.  After a cached prefix, or the first `--max-ubatch-tokens` tokens, the rest
of a prompt is processed token by token with `decode_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wire.layout import KVLayout
from worker.compute.shared_memory import Bytes
from worker.executor.stepwise import MAX_MODEL_LEN, Prediction, StepwiseExecutor, describe

PrefillFn = Callable[[bytes, int], tuple[bytes, bytes]]
DecodeStepFn = Callable[[bytes, int, int], tuple[int, bytes]]


class FunctionModel:
    """Adapts the two functions to `worker.executor.stepwise.StepwiseModel`."""

    def __init__(
        self,
        prefill: PrefillFn,
        decode_step: DecodeStepFn,
        token_bytes: int,
        first_token: Callable[[bytes], int] | None = None,
    ) -> None:
        self._prefill = prefill
        self._decode_step = decode_step
        self._token_bytes = token_bytes
        self._first_token = first_token

    def prefill(self, token_ids: npt.NDArray[np.int32]) -> tuple[Bytes, Prediction | None]:
        activation, kv = self._prefill(token_ids.astype("<u4").tobytes(), len(token_ids))
        rows = self._rows("PrefillFn", kv, len(token_ids))
        return rows, self._first_token(activation) if self._first_token else None

    def step(self, kv: Bytes, token_id: int, position: int) -> tuple[Bytes, Prediction]:
        prediction, updated = self._decode_step(kv.tobytes(), token_id, position)
        rows = self._rows("DecodeStepFn", updated, position + 1)
        if not np.array_equal(rows[:position], kv):
            raise ValueError("DecodeStepFn changed the KV of earlier tokens; it may only add to it")
        return rows[position], prediction

    def _rows(self, name: str, kv: bytes, num_tokens: int) -> Bytes:
        expected = num_tokens * self._token_bytes
        if len(kv) != expected:
            raise ValueError(
                f"{name} returned {len(kv)} bytes of KV for {num_tokens} tokens, not {expected}: "
                f"the layout has {self._token_bytes} bytes a token"
            )
        return np.frombuffer(kv, np.uint8).reshape(num_tokens, self._token_bytes)


def serve_functions(
    prefill: PrefillFn,
    decode_step: DecodeStepFn,
    *,
    layout: KVLayout,
    vocab_size: int,
    eos_token_ids: Iterable[int] = (),
    max_model_len: int = MAX_MODEL_LEN,
    first_token: Callable[[bytes], int] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> StepwiseExecutor:
    """Create an executor from two functions.

    Args:
        layout: The layout of a token's KV, as announced to routers and workers.  For any 2 n bytes:
            ``KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=n, dtype="uint8")``.
        max_model_len: The maximum sequence length of the functions, in tokens.
        settings: The keyword arguments that the worker passes to executor factories.

    Raises:
        ValueError: The settings request longer sequences than `max_model_len`.
    """
    info = describe(
        settings or {},
        layout=layout,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
    )
    model = FunctionModel(prefill, decode_step, layout.token_bytes, first_token)
    return StepwiseExecutor(model, info)
