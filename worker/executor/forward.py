"""Serves a custom model with float32 KV, given as a `Prefiller` and a `ForwardModel` (seed 001).

The prefiller returns the KV of a prompt in each layer.  The forward model takes one token and the
KV of the tokens before it and returns logits, so all sampling options work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wire.layout import KVLayout
from worker.compute.shared_memory import Bytes
from worker.executor.stepwise import MAX_MODEL_LEN, Prediction, StepwiseExecutor, describe

Float32 = npt.NDArray[np.float32]
# Returns the (k, v) of a layer, each float32 [tokens, num_kv_heads, head_dim], in any shape with
# that number of values.
GetKV = Callable[[int], tuple[Float32, Float32]]


class Prefiller(Protocol):
    """The prefill part of a custom model."""

    def prefill(self, token_ids: npt.NDArray[np.int32]) -> tuple[int, GetKV]:
        """Process the tokens of a prompt, [T].

        Returns:
            The number of layers, and a function that returns the KV of all T tokens in a layer,
            numbered from 0.
        """


class ForwardModel(Protocol):
    """The decode part of a custom model."""

    def forward(self, token_id: int, get_kv: GetKV) -> tuple[Float32, GetKV]:
        """Process one token; return its [vocab] logits and its KV in each layer.

        `get_kv` returns a layer's KV of all earlier tokens.
        """


class ForwardPair:
    """Adapts a prefiller and a forward model to `worker.executor.stepwise.StepwiseModel`."""

    def __init__(
        self, prefiller: Prefiller, forward_model: ForwardModel, layout: KVLayout, vocab_size: int
    ) -> None:
        self._prefiller = prefiller
        self._forward_model = forward_model
        (self._group,) = layout.kv_groups
        self._vocab_size = vocab_size

    def prefill(self, token_ids: npt.NDArray[np.int32]) -> tuple[Bytes, Prediction | None]:
        num_layers, get_kv = self._prefiller.prefill(token_ids)
        if num_layers != self._group.num_layers:
            raise ValueError(
                f"the prefiller has {num_layers} layers, the layout {self._group.num_layers}"
            )
        return self._rows("the prefiller", get_kv, len(token_ids)), None

    def step(self, kv: Bytes, token_id: int, position: int) -> tuple[Bytes, Prediction]:
        logits, get_kv = self._forward_model.forward(token_id, self._layers(kv))
        if np.shape(logits) != (self._vocab_size,):
            raise ValueError(
                f"the forward model's logits are {np.shape(logits)}, not ({self._vocab_size},)"
            )
        (row,) = self._rows("the forward model", get_kv, 1)
        return row, np.asarray(logits, np.float32)

    def _rows(self, name: str, get_kv: GetKV, num_tokens: int) -> Bytes:
        """Concatenate the KV of all layers into one row for each token."""
        group = self._group
        shape = (num_tokens, group.num_kv_heads, group.key_dim)
        rows = np.empty((num_tokens, group.num_layers, 2, *shape[1:]), np.float32)
        for layer in range(group.num_layers):
            for index, values in enumerate(get_kv(layer)):
                if np.size(values) != np.prod(shape):
                    raise ValueError(
                        f"{name} gave {np.size(values)} values for {'kv'[index]} of layer {layer}, "
                        f"not {num_tokens} tokens x {group.num_kv_heads} x {group.key_dim}"
                    )
                rows[:, layer, index] = np.reshape(values, shape)
        return rows.reshape(num_tokens, -1).view(np.uint8)

    def _layers(self, kv: Bytes) -> GetKV:
        group = self._group
        shape = (len(kv), group.num_layers, 2, group.num_kv_heads, group.key_dim)
        rows = np.ascontiguousarray(kv).view(np.float32).reshape(shape)
        return lambda layer: (rows[:, layer, 0], rows[:, layer, 1])


def serve_forward(
    prefiller: Prefiller,
    forward_model: ForwardModel,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    eos_token_ids: Iterable[int] = (),
    max_model_len: int = MAX_MODEL_LEN,
    settings: Mapping[str, Any] | None = None,
) -> StepwiseExecutor:
    """Create an executor from a prefiller and a model with `forward`.

    Args:
        max_model_len: The maximum sequence length of the model, in tokens.
        settings: The keyword arguments that the worker passes to executor factories.

    Raises:
        ValueError: The settings request longer sequences than `max_model_len`.
    """
    layout = KVLayout.uniform(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="float32"
    )
    info = describe(
        settings or {},
        layout=layout,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
    )
    return StepwiseExecutor(ForwardPair(prefiller, forward_model, layout, vocab_size), info)
