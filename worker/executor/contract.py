"""The interface of executors: two attributes and four methods over paged KV (seed 003).

The engine calls an executor from one thread; only its `KVCache` is called from several.  Status,
metrics and warmup are the same for all executors: `worker.engine.instrumented` adds them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from wire.errors import ErrorCode
from wire.layout import KVLayout, layer_bytes
from wire.options import Structure
from wire.payloads import Logprobs
from worker.compute.contract import KVCache
from worker.executor.batch import Batch
from worker.executor.structured_output import Structured

# The least slots for states of a cache; a running sequence may need two.
MIN_STATES: Final = 16
# Memory is divided for sequences of this many windows, or of the model's context if that is less.
# Shorter sequences run out of window blocks first, longer ones of the other blocks.
EXPECTED_WINDOWS: Final = 8
# The least sequences whose windows have room.
MIN_WINDOWS: Final = 4


def blocks_of_window(window: int, block_size: int) -> int:
    """Return the most blocks that a sequence needs for a window, the next token's included.

    The window may start and end inside a block, and a step may reach one block further.
    """
    return -(-(window - 1) // block_size) + 2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model served.  `layout` is the KV layout and dtype, on the device and on the wire."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    layout: KVLayout


class Attention(StrEnum):
    """Kinds of attention."""

    MULTI_HEAD = "multi_head"
    GROUPED_QUERY = "grouped_query"
    MULTI_QUERY = "multi_query"
    SLIDING_WINDOW = "sliding_window"
    PAGED = "paged"
    LINEAR = "linear"

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int) -> Attention:
        """Return the kind by the numbers of heads."""
        if num_heads == num_kv_heads:
            return cls.MULTI_HEAD
        return cls.MULTI_QUERY if num_kv_heads == 1 else cls.GROUPED_QUERY


@dataclass(frozen=True, slots=True)
class MemoryRequirements:
    """The memory that serving takes, in bytes.

    Attributes:
        activation_bytes_per_token: For each token of the largest step.
        kv_bytes_per_token: Of layers that keep every token.
        state_bytes: Of one state of a sequence, in layers that keep one.
        window_bytes_per_token: Of layers with a window.
        window: The size of the largest window; 0 for none.
        expected_tokens: The assumed length of a sequence, to divide memory between both kinds.
    """

    parameter_bytes: int
    activation_bytes_per_token: int
    kv_bytes_per_token: int
    state_bytes: int = 0
    window_bytes_per_token: int = 0
    window: int = 0
    expected_tokens: int = 0

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        max_model_len: int,
        *,
        parameter_bytes: int = 0,
        activation_bytes_per_token: int = 0,
    ) -> MemoryRequirements:
        """Return the requirements of a model with this KV layout."""
        windowed = [group for group in layout.kv_groups if group.window is not None]
        window_bytes = sum(group.num_layers * layer_bytes(group) for group in windowed)
        window = max(layout.windows, default=0)
        return cls(
            parameter_bytes,
            activation_bytes_per_token,
            layout.token_bytes - window_bytes,
            layout.state_bytes,
            window_bytes,
            window,
            min(EXPECTED_WINDOWS * window, max_model_len),
        )

    def total(self, max_ubatch_tokens: int, num_blocks: int, block_size: int) -> int:
        """Return the bytes for weights, activations and cache."""
        activations = self.activation_bytes_per_token * max_ubatch_tokens
        cache_bytes = self.cache_bytes(num_blocks, block_size, max_ubatch_tokens)
        return self.parameter_bytes + activations + cache_bytes

    def cache_bytes(self, num_blocks: int, block_size: int, max_ubatch_tokens: int) -> int:
        """Return the bytes of a cache, with its window blocks and states."""
        states = self.num_states(num_blocks, block_size) * self.state_bytes
        windowed = self.num_window_blocks(num_blocks, block_size, max_ubatch_tokens)
        kv_bytes = num_blocks * self.kv_bytes_per_token + windowed * self.window_bytes_per_token
        return kv_bytes * block_size + states

    def num_window_blocks(self, num_blocks: int, block_size: int, max_ubatch_tokens: int) -> int:
        """Return how many window blocks go with so many blocks: at most one each.

        Enough for the sequences of `expected_tokens` that fill the blocks, and for one step.
        """
        if self.window_bytes_per_token == 0:
            return 0
        of_sequence = blocks_of_window(self.window, block_size)
        length = -(-self.expected_tokens // block_size)
        needed = max(MIN_WINDOWS * of_sequence, -(-num_blocks * of_sequence // length))
        return min(num_blocks, needed + max_ubatch_tokens // block_size)

    def num_states(self, num_blocks: int, block_size: int) -> int:
        """Return how many states go with so many blocks.

        They take as much memory as the blocks, at most two per block, at least `MIN_STATES`.
        """
        if self.state_bytes == 0:
            return 0
        token_bytes = self.kv_bytes_per_token + self.window_bytes_per_token
        equal = num_blocks * block_size * token_bytes // self.state_bytes
        return max(min(equal, 2 * num_blocks), MIN_STATES)

    def __add__(self, other: MemoryRequirements) -> MemoryRequirements:
        """Return the requirements of this model with a draft model `other`.

        The other one keeps every token in all its layers.
        """
        other_kv_bytes = other.kv_bytes_per_token + other.window_bytes_per_token
        return replace(
            self,
            parameter_bytes=self.parameter_bytes + other.parameter_bytes,
            activation_bytes_per_token=self.activation_bytes_per_token
            + other.activation_bytes_per_token,
            kv_bytes_per_token=self.kv_bytes_per_token + other_kv_bytes,
            state_bytes=self.state_bytes + other.state_bytes,
        )

    def num_blocks(self, memory_bytes: int, max_ubatch_tokens: int, block_size: int) -> int:
        """Return how many KV blocks fit `memory_bytes`, after everything else.

        Raises:
            ValueError: Not even one fits; the message says how many bytes it takes.
        """
        least = self.total(max_ubatch_tokens, 1, block_size)
        if memory_bytes < least:
            raise ValueError(f"{memory_bytes} bytes are too few for this model, it takes {least}")
        rest = memory_bytes - self.total(max_ubatch_tokens, 0, block_size)
        return self.blocks_in(rest, block_size, max_ubatch_tokens)

    def blocks_in(self, cache_bytes: int, block_size: int, max_ubatch_tokens: int) -> int:
        """Return how many blocks fit, with their window blocks and states."""
        # If all layers have a window, other blocks take no memory.
        most = cache_bytes // max(1, self.kv_bytes_per_token * block_size)
        return bisect_right(
            range(1, most + 1),
            cache_bytes,
            key=lambda n: self.cache_bytes(n, block_size, max_ubatch_tokens),
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of an executor.

    Attributes:
        attention: Every kind it computes; empty for a model without attention.
        max_batch_sequences: Most sequences in one step; None for any number.
        continuous_batching: Sequences may join while others generate.
        enough_tokens: Prompt tokens of a step beyond which no further prompt starts in it, because
            longer steps compute no more tokens a second.  None for no such limit.
        speculative: Several rows of a sequence may be sampled in one step, and tokens taken back;
            False for layers that keep a state.
        dtypes: Choices of `dtype`; empty if the setting has no meaning.
        devices: Choices of `device`; likewise.
        arithmetic: Two workers with the same model and the same value compute the same text.
        num_threads: Threads that compute a step, in each process.
        num_shards: Tensor-parallel processes.
        num_stages: Pipeline stages.
    """

    memory: MemoryRequirements
    attention: frozenset[Attention] = frozenset()
    max_batch_sequences: int | None = None
    continuous_batching: bool = True
    enough_tokens: int | None = None
    speculative: bool = False
    dtypes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    arithmetic: str = ""
    num_threads: int = 1
    num_shards: int = 1
    num_stages: int = 1


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The next token of one sampled row."""

    token_id: int
    logprobs: Logprobs | None = None


class SequenceFailed(Exception):
    """One sequence of a batch cannot be computed, for a reason of its own.

    `forward`, `sample` and `score` may raise it.  The engine ends that sequence with an error that
    is not retried on another worker, and repeats the step for the others.  So earlier KV and states
    must be unchanged, and the device must be able to compute another step.  Any other exception
    ends the process.

    Attributes:
        index: The sequence in the batch, 0 to S - 1.
        message: The reason, cut to `MAX_MESSAGE` characters, for logs; clients do not see it.
        code: INVALID_REQUEST if the request is wrong; then the client sees the message.
    """

    MAX_MESSAGE: Final = 500

    def __init__(self, index: int, message: str, code: ErrorCode = ErrorCode.MODEL_FAILED) -> None:
        self.index = index
        self.message = message[: self.MAX_MESSAGE]
        self.code = code
        super().__init__(self.message)


class Executor(Protocol):
    """A model that can be stepped.  `allocate` comes first, once."""

    info: ModelInfo
    capabilities: Capabilities

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        """Make the paged KV cache that later batches address.

        `num_states` is passed only if the layout has states, `num_window_blocks` only if layers
        have a window.  With 0 window blocks those layers keep every token.
        """

    def forward(self, batch: Batch) -> Any:
        """Run the batch, write its KV, return logits (opaque to the engine) of `sample_rows`.

        The logits are valid until the next `forward`.

        Raises:
            SequenceFailed: One of the sequences cannot be computed.
        """

    def sample(self, logits: Any, batch: Batch) -> list[SampledToken]:
        """Draw one token per sampled row; a pure function of logits and `Sampling`.

        Raises:
            SequenceFailed: No next token can be chosen for one of the sequences.
        """

    def shutdown(self) -> None:
        """Free the cache and the weights."""


@runtime_checkable
class Scorer(Protocol):
    """An optional capability: prompt logprobs.

    `forward` then computes the logits of `score_rows` as well as those of `sample_rows`.
    """

    def score(self, logits: Any, batch: Batch) -> list[bytes]:
        """Return the rows of each of the batch's scorings, packed as in `wire.logprobs`."""


@runtime_checkable
class Structurer(Protocol):
    """An optional capability: structured output.

    `sample` then draws only tokens that the `structured` of a sampling allows.
    """

    def structured(self, structure: Structure, prompt_len: int, tenant: int = 0) -> Structured:
        """Start to compile a structure for a response; tenants share the threads fairly.

        The result tells when it is ready, and then whether the structure is valid.
        """


@runtime_checkable
class Preparer(Protocol):
    """An optional capability: compile kernels and record steps before the first request."""

    def prepare(self) -> int:
        """Compile and record steps, once, after `allocate`.

        Return the length of a prompt whose prefill compiles the rest, for the warmup.
        """


class Drawn(Protocol):
    """Tokens that a device is drawing."""

    def tokens(self) -> list[SampledToken]:
        """Wait for the step; return one token for each sampled row.  Called once."""


@runtime_checkable
class Drawer(Protocol):
    """An optional capability: the engine starts a step before it has read the previous one.

    `forward` and `draw` only start a step on the device, which runs steps and KV copies in the
    order of their start.  In `token_ids` of the next step, -1 - r stands for the token of row r of
    the last `draw`.
    """

    def can_draw(self, batch: Batch) -> bool:
        """Return whether the device can draw all tokens of the batch without the host.

        False if a row might have no allowed token, for which `sample` would fail its sequence.
        """

    def draw(self, logits: Any, batch: Batch) -> Drawn:
        """Start to draw the tokens that `sample` would return; `can_draw` must allow it."""
