"""A hash executor on a sick card: one token of every answer is another one.

python -m worker --executor tests.sick_executor:create
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from worker.executor.batch import Batch, rows_of
from worker.executor.contract import SampledToken
from worker.executor.hash import HashExecutor
from worker.executor.hash import create as create_hash

# The index of the token in its answer.
POSITION = 7


class SickExecutor(HashExecutor):
    def sample(self, logits: list[int], batch: Batch) -> list[SampledToken]:
        tokens = super().sample(logits, batch)
        for index, row in enumerate(rows_of(batch.samplings)):
            if row.position - row.sampling.prompt_len == POSITION:
                other = (tokens[index].token_id + 1) % self.info.vocab_size
                tokens[index] = structs.replace(tokens[index], token_id=other)
        return tokens


def create(**settings: Any) -> SickExecutor:
    executor = SickExecutor(create_hash(**settings).info)
    executor.capabilities = replace(executor.capabilities, arithmetic="sick")
    return executor
