"""Engines on the hash executor, stepped until they rest, and what their outputs say."""

from collections.abc import Iterable
from typing import Any, TypeVar

from wire.options import Options
from worker.engine.engine import Engine
from worker.engine.outputs import Output, Token
from worker.executor.batch import Batch
from worker.executor.contract import ModelInfo
from worker.executor.hash import EOS_TOKEN_IDS, LAYOUT, HashExecutor

Kind = TypeVar("Kind")
VOCAB_SIZE = 500
MAX_MODEL_LEN = 64


class RecordingExecutor(HashExecutor):
    """The hash executor, remembering what kind of batches it was given."""

    def __init__(self) -> None:
        super().__init__(
            ModelInfo("hash", "hash", VOCAB_SIZE, MAX_MODEL_LEN, EOS_TOKEN_IDS, LAYOUT)
        )
        self.batches: list[Batch] = []

    def forward(self, batch: Batch) -> list[int]:
        self.batches.append(batch)
        return super().forward(batch)


def engine_of(
    num_blocks: int = 64,
    block_size: int = 4,
    executor: RecordingExecutor | None = None,
    **settings: Any,
) -> Engine:
    executor = executor or RecordingExecutor()
    return Engine(executor, num_blocks=num_blocks, block_size=block_size, **settings)


def run(engine: Engine, max_steps: int = 500) -> list[Output]:
    """Step until the engine has nothing to do."""
    outputs: list[Output] = []
    for _ in range(max_steps):
        if not engine.has_work():
            return outputs
        outputs += engine.step()
        engine.check()
        engine.pool.audit()
    raise AssertionError("the engine does not come to rest")


def text(outputs: Iterable[Output], request_id: int) -> list[int]:
    return [
        output.token_id
        for output in outputs
        if isinstance(output, Token)
        and output.request_id == request_id
        and output.finish_reason != "stop"
    ]


def of_kind(outputs: Iterable[Output], kind: type[Kind]) -> list[Kind]:
    return [output for output in outputs if isinstance(output, kind)]


GREEDY = Options(ignore_eos=True)
