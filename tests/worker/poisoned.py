"""An executor that one token is too much for."""

from __future__ import annotations

from typing import Final

import numpy as np

from worker.executor.batch import Batch
from worker.executor.contract import SampledToken, SequenceFailed
from worker.executor.hash import HashExecutor, create

POISON: Final = 13


class PoisonedExecutor(HashExecutor):
    """The hash executor; fails the first sequence of a batch that has `POISON` among its tokens.

    Attributes:
        place: When it does: in "forward", after the KV of all is written; in "sample" or "score".
    """

    def __init__(self, place: str = "forward", max_model_len: int | None = None) -> None:
        super().__init__(create(max_model_len=max_model_len).info)
        self.place = place

    def forward(self, batch: Batch) -> list[int]:
        logits = super().forward(batch)
        self._taste(batch, "forward")
        return logits

    def sample(self, logits: list[int], batch: Batch) -> list[SampledToken]:
        self._taste(batch, "sample")
        return super().sample(logits, batch)

    def score(self, logits: list[int], batch: Batch) -> list[bytes]:
        self._taste(batch, "score")
        return super().score(logits, batch)

    def _taste(self, batch: Batch, place: str) -> None:
        rows = np.flatnonzero(batch.token_ids == POISON)
        if place == self.place and len(rows):
            index = int(np.searchsorted(batch.query_starts, rows[0], side="right")) - 1
            raise SequenceFailed(index, f"token {POISON} is too much")
