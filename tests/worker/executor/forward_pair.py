"""A Prefiller and a ForwardModel of our own, a few sums of random numbers each."""

import numpy as np
import numpy.typing as npt

from worker.executor.forward import Float32, GetKV, serve_forward
from worker.executor.stepwise import StepwiseExecutor

VOCAB, LAYERS, HEADS, DIM = 50, 2, 2, 4
EMBED = np.random.default_rng(3).standard_normal((VOCAB, LAYERS, 2, HEADS, DIM)).astype(np.float32)


class Prefiller:
    num_layers = LAYERS

    def prefill(self, token_ids: npt.NDArray[np.int32]) -> tuple[int, GetKV]:
        kv = EMBED[token_ids] * (1 + np.arange(len(token_ids)))[:, None, None, None, None]
        return self.num_layers, lambda layer: (kv[:, layer, 0], kv[:, layer, 1].reshape(-1))


class ForwardModel:
    vocab_size = VOCAB
    num_rows = 1

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def forward(self, token_id: int, get_kv: GetKV) -> tuple[Float32, GetKV]:
        keys = [get_kv(layer)[0] for layer in range(LAYERS)]
        values = [get_kv(layer)[1] for layer in range(LAYERS)]
        self.seen.append(keys[0].shape)
        position = len(keys[0])
        now = EMBED[token_id] * (1 + position)
        state = sum(np.tanh(k).sum(0) - np.cos(v).sum(0) for k, v in zip(keys, values, strict=True))
        logits = EMBED[:, 0, 0].reshape(VOCAB, -1) @ (state + now[0, 0]).reshape(-1)
        rows = np.repeat(now[None], self.num_rows, 0)
        return logits[: self.vocab_size], lambda layer: (rows[:, layer, 0], rows[:, layer, 1])


def pair(prefiller: Prefiller | None = None, model: ForwardModel | None = None) -> StepwiseExecutor:
    return serve_forward(
        prefiller or Prefiller(),
        model or ForwardModel(),
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        vocab_size=VOCAB,
        settings={"model_name": "pair"},
    )
