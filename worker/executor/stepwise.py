"""The executor for models that compute one sequence at a time: `functions` and `forward`.

Such a model prefills a whole prompt, or processes one token given the KV of all earlier tokens.
Each call gets the KV from the blocks, and the model keeps no data of a sequence between calls, so
an error ends only the sequence being computed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from wire.errors import ErrorCode
from wire.layout import KVLayout
from worker.compute.shared_memory import Bytes
from worker.executor.batch import Batch, Int32
from worker.executor.contract import (
    Attention,
    Capabilities,
    MemoryRequirements,
    ModelInfo,
    SampledToken,
    SequenceFailed,
)
from worker.executor.host_kv_cache import HostKVCache

MAX_MODEL_LEN: Final = 32_768

# A prediction of the next token: its id, or [vocab] logits to sample it from.
Prediction = int | npt.NDArray[np.float32]


class StepwiseModel(Protocol):
    """A custom model; its KV is uint8 [tokens, token_bytes], each row in the layout's order."""

    def prefill(self, token_ids: npt.NDArray[np.int32]) -> tuple[Bytes, Prediction | None]:
        """Prefill a prompt; return its KV and the prediction for the next token, if available."""

    def step(self, kv: Bytes, token_id: int, position: int) -> tuple[Bytes, Prediction]:
        """Process one token at `position`; return its KV row and the prediction for the next."""


class StepwiseExecutor:
    """Computes the sequences of a batch one by one; implements `contract.Executor`."""

    def __init__(self, model: StepwiseModel, info: ModelInfo) -> None:
        self.info = info
        self.capabilities = Capabilities(
            memory=MemoryRequirements(0, 0, info.layout.token_bytes),
            attention=frozenset({Attention.PAGED}),
            dtypes=tuple({group.dtype for group in info.layout.kv_groups}),
            devices=("cpu",),
        )
        self._model = model
        self._cache: HostKVCache | None = None

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> HostKVCache:
        self._cache = HostKVCache(self.info.layout, num_blocks, block_size)
        return self._cache

    def forward(self, batch: Batch) -> list[Prediction]:
        """Write the batch's KV; return the predictions of the sampled rows.

        Raises:
            SequenceFailed: The model raised (see the cause), or returned invalid KV or predictions.
        """
        assert self._cache is not None, "allocate comes first"
        predictions: list[Prediction] = []
        ends = batch.query_starts[1:].tolist()
        wanted = set(batch.sample_rows.tolist())
        for index, (start, end) in enumerate(zip(batch.query_starts.tolist(), ends, strict=False)):
            token_ids, first = batch.token_ids[start:end], int(batch.positions[start])
            is_sampled = end - 1 in wanted
            try:
                rows, prediction = self._compute(
                    batch.block_tables[index], token_ids, first, is_sampled
                )
                self._cache.write(batch.slots[start:end], rows)
                if is_sampled:
                    predictions.append(self._checked(prediction))
            except Exception as error:
                raise SequenceFailed(index, f"{type(error).__name__}: {error}") from error
        return predictions

    def sample(self, logits: list[Prediction], batch: Batch) -> list[SampledToken]:
        """Return the ids that the model chose, or sample from its logits."""
        indexes = [index for index, it in enumerate(logits) if isinstance(it, np.ndarray)]
        if not indexes:
            return [SampledToken(int(prediction)) for prediction in logits]
        # Imported here, because a model that chooses tokens itself does not need torch.
        import torch

        from worker.executor import sampler

        rows = torch.from_numpy(np.stack([np.asarray(logits[index]) for index in indexes]))
        samplings = [batch.samplings[index] for index in indexes]
        try:
            drawn = iter(sampler.sample(rows, samplings, self.info.eos_token_ids))
        except sampler.NoTokenLeft as error:
            index = batch.sequence_of(indexes[error.row])
            raise SequenceFailed(index, str(error), ErrorCode.INVALID_REQUEST) from None
        return [
            next(drawn) if isinstance(prediction, np.ndarray) else SampledToken(prediction)
            for prediction in logits
        ]

    def shutdown(self) -> None:
        self._cache = None

    def _compute(
        self, table: Int32, token_ids: Int32, first: int, needs_prediction: bool
    ) -> tuple[Bytes, Prediction | None]:
        """Return the KV of tokens from position `first` on, and the prediction for the next."""
        prediction: Prediction | None
        if first == 0:
            rows, prediction = self._model.prefill(token_ids)
            if prediction is None and needs_prediction:
                _, prediction = self._model.step(rows[:-1], int(token_ids[-1]), len(rows) - 1)
            return rows, prediction
        # After a cached prefix, in a later chunk, or while decoding: process token by token.
        assert self._cache is not None
        kv = np.empty((first + len(token_ids), self.info.layout.token_bytes), np.uint8)
        kv[:first] = self._cache.rows(table, first)
        for position, token_id in enumerate(token_ids.tolist(), first):
            kv[position], prediction = self._model.step(kv[:position], token_id, position)
        return kv[first:], prediction

    def _checked(self, prediction: object) -> Prediction:
        """Return a prediction as an int or as float32 [vocab] logits.

        Raises:
            TypeError: It is neither an integer nor an array.
            ValueError: It does not fit the vocabulary, or no token can be sampled from it.
        """
        vocab_size = self.info.vocab_size
        if isinstance(prediction, np.ndarray) and prediction.ndim:
            logits = np.asarray(prediction, np.float32)
            if logits.shape != (vocab_size,):
                raise ValueError(f"the model's logits are {logits.shape}, not ({vocab_size},)")
            if not np.isfinite(highest := logits.max()):
                raise ValueError(f"the highest of the model's logits is {highest}")
            return logits
        try:
            token_id = operator.index(prediction)  # type: ignore[arg-type]
        except TypeError:
            kind = type(prediction).__name__
            raise TypeError(f"the model chose a {kind}, not the id of a token") from None
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"the model chose token {token_id}, not one of 0 to {vocab_size - 1}")
        return token_id


def describe(
    settings: Mapping[str, Any],
    *,
    layout: KVLayout,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    max_model_len: int,
) -> ModelInfo:
    """Return the description of a model; `settings` are the arguments of an executor factory.

    Raises:
        ValueError: They request longer sequences than `max_model_len`, or the layout is invalid or
            has layers that do not keep the KV of all tokens.
    """
    try:
        msgspec.convert(msgspec.to_builtins(layout), KVLayout)  # as peers will read it
    except msgspec.ValidationError as error:
        raise ValueError(f"{layout}: {error}") from error
    if layout.windows or layout.has_state:
        raise ValueError(f"{layout}: all layers have to keep the KV of all tokens here")
    limit = settings.get("max_model_len")
    if limit is not None and not 0 < limit <= max_model_len:
        raise ValueError(
            f"max_model_len is {limit}, the model allows 1 to {max_model_len}; "
            "lower --max-model-len"
        )
    return ModelInfo(
        name=settings.get("model_name", "model"),
        fingerprint=settings.get("fingerprint", ""),
        vocab_size=vocab_size,
        max_model_len=limit or max_model_len,
        eos_token_ids=frozenset(eos_token_ids),
        layout=layout,
    )
