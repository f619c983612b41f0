"""What the engine asks of an executor: seed 003's ModelExecutor, over paged KV.

An executor computes and nothing else: no queues, no network, no threads of its own.  The engine
calls it from one thread.  `KVCache.pack` and `unpack` alone are called from the transfer thread,
and only on blocks that no step writes at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from wire.parts import Buffer
from wire.payloads import KVLayout, Logprobs
from wire.segment import Rectangle
from worker.batch import Batch


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served.  `layout` is the KV layout and dtype, on the device and on the wire."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    layout: KVLayout


class SampledToken(NamedTuple):
    """The next token of one sampled row."""

    token_id: int
    logprobs: Logprobs | None = None


class KVCache(Protocol):
    """The paged KV of one worker."""

    num_blocks: int
    block_size: int
    layout: KVLayout

    def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
        """Copy a rectangle of a sequence's KV out.

        Returns:
            Contiguous bytes in the wire's order [layer][k|v][kv_head][token][head_dim]; the view
            keeps its memory alive and nobody writes to it again.
        """

    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        """Copy a segment in the wire's order into a sequence's blocks.

        Raises:
            ValueError: The segment's size does not fit the rectangle.
        """


class Executor(Protocol):
    """A model that can be stepped.  `allocate` comes first, once."""

    info: ModelInfo

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        """Make the paged KV cache that later batches address."""

    def forward(self, batch: Batch) -> Any:
        """Run the batch, write its KV, return logits (opaque to the engine) of `sample_rows`."""

    def sample(self, logits: Any, batch: Batch) -> list[SampledToken]:
        """Draw one token per sampled row; a pure function of logits and `Sampling`."""

    def shutdown(self) -> None:
        """Give back what `allocate` and loading took."""


@runtime_checkable
class Scorer(Protocol):
    """What an executor can do besides if it can give prompt logprobs.

    Its `forward` then computes the logits of `score_rows` as well as those of `sample_rows`.
    """

    def score(self, logits: Any, batch: Batch) -> list[bytes]:
        """Return the rows of each of the batch's scorings, packed as in `wire.logprobs`."""
