"""The interface of executors: two attributes and four methods over paged KV (seed 003).

The engine calls an executor from one thread; only its `KVCache` is used by several.  Status,
metrics and warmup are the same for all executors: `worker.engine.instrumented` adds them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
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

# The least number of state slots in a cache; a running sequence may need two.
MIN_STATES: Final = 16
# Sequences are assumed to be this many windows long, or as long as the context if that is less.
# Shorter sequences run out of window blocks first, longer sequences of other blocks.
EXPECTED_WINDOWS: Final = 8
# A cache has window blocks for at least this many sequences.
MIN_WINDOWS: Final = 4


def blocks_of_window(window: int, block_size: int) -> int:
    """Return the most blocks that a sequence needs for its window and its next token.

    The window may start and end inside a block, and a step may reach one block further.
    """
    return -(-(window - 1) // block_size) + 2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model; `layout` is its KV layout, both on the device and in transfers."""

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
        """Return the kind of attention with these numbers of heads."""
        if num_heads == num_kv_heads:
            return cls.MULTI_HEAD
        return cls.MULTI_QUERY if num_kv_heads == 1 else cls.GROUPED_QUERY


@dataclass(frozen=True, slots=True)
class MemoryRequirements:
    """The memory that serving a model takes, in bytes.

    Attributes:
        activation_bytes_per_token: The activations for each token of the largest step.
        kv_bytes_per_token: The KV of one token in layers without a sliding window.
        state_bytes: One recurrent state of a sequence, in all layers that have one.
        window_bytes_per_token: The KV of one token in sliding-window layers.
        window: The size of the largest window, in tokens; 0 for none.
        expected_tokens: The assumed length of a sequence, which sets the ratio of window blocks.
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
        """Return the size of weights, activations and KV cache in bytes."""
        activations = self.activation_bytes_per_token * max_ubatch_tokens
        cache_bytes = self.cache_bytes(num_blocks, block_size, max_ubatch_tokens)
        return self.parameter_bytes + activations + cache_bytes

    def cache_bytes(self, num_blocks: int, block_size: int, max_ubatch_tokens: int) -> int:
        """Return the size of a KV cache in bytes, with its window blocks and recurrent states."""
        states = self.num_states(num_blocks, block_size) * self.state_bytes
        windowed = self.num_window_blocks(num_blocks, block_size, max_ubatch_tokens)
        kv_bytes = num_blocks * self.kv_bytes_per_token + windowed * self.window_bytes_per_token
        return kv_bytes * block_size + states

    def num_window_blocks(self, num_blocks: int, block_size: int, max_ubatch_tokens: int) -> int:
        """Return the number of window blocks for a cache of `num_blocks`: at most one each.

        They suffice for one step and for sequences of `expected_tokens` that fill the blocks.
        """
        if self.window_bytes_per_token == 0:
            return 0
        of_sequence = blocks_of_window(self.window, block_size)
        length = -(-self.expected_tokens // block_size)
        needed = max(MIN_WINDOWS * of_sequence, -(-num_blocks * of_sequence // length))
        return min(num_blocks, needed + max_ubatch_tokens // block_size)

    def num_states(self, num_blocks: int, block_size: int) -> int:
        """Return the number of state slots for a cache of `num_blocks`.

        States take as much memory as blocks; at most two per block, and at least `MIN_STATES`.
        """
        if self.state_bytes == 0:
            return 0
        token_bytes = self.kv_bytes_per_token + self.window_bytes_per_token
        equal = num_blocks * block_size * token_bytes // self.state_bytes
        return max(min(equal, 2 * num_blocks), MIN_STATES)

    def __add__(self, other: MemoryRequirements) -> MemoryRequirements:
        """Return the requirements of this model together with a draft model `other`.

        The draft model keeps the KV of every token in all its layers.
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
        """Return how many KV blocks fit `memory_bytes` besides weights and activations.

        Raises:
            ValueError: Not even one block fits; the message has the least size.
        """
        least = self.total(max_ubatch_tokens, 1, block_size)
        if memory_bytes < least:
            raise ValueError(f"{memory_bytes} bytes are too few for this model, it takes {least}")
        rest = memory_bytes - self.total(max_ubatch_tokens, 0, block_size)
        return self.blocks_in(rest, block_size, max_ubatch_tokens)

    def blocks_in(self, cache_bytes: int, block_size: int, max_ubatch_tokens: int) -> int:
        """Return how many blocks, with window blocks and states, fit `cache_bytes`."""
        # If all layers have a sliding window, the blocks themselves take no memory.
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
        attention: The kinds of attention that it computes; empty for a model without attention.
        max_batch_sequences: The most sequences in one step; None for no limit.
        continuous_batching: Sequences may join a batch while others decode.
        enough_tokens: Once a step has this many prompt tokens, no further prompt starts in it,
            because longer steps do not compute more tokens per second.  None for no such limit.
        speculative: Several rows of a sequence may be sampled in one step, and tokens rejected;
            False for layers with a recurrent state.
        dtypes: The valid values of `dtype`; empty if the setting has no effect.
        devices: The valid values of `device`; empty if the setting has no effect.
        arithmetic: Two workers with the same model and the same value compute the same text.
        num_threads: The number of threads that compute a step, in each process.
        num_shards: The number of tensor-parallel processes.
        num_stages: The number of pipeline stages.
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
    """One sequence of a batch cannot be computed, but the others can.

    `forward`, `sample` and `score` may raise it.  The engine ends that sequence with an error that
    is not retried on another worker, and repeats the step for the other sequences.  Therefore
    earlier KV and states must be unchanged, and the device must be able to compute another step.
    Any other exception ends the process.

    Attributes:
        index: The index of the sequence in the batch, 0 to S - 1.
        message: The reason, truncated to `MAX_MESSAGE` characters, for logs and not for clients.
        code: INVALID_REQUEST if the request is wrong; clients then receive the message.
    """

    MAX_MESSAGE: Final = 500

    def __init__(self, index: int, message: str, code: ErrorCode = ErrorCode.MODEL_FAILED) -> None:
        self.index = index
        self.message = message[: self.MAX_MESSAGE]
        self.code = code
        super().__init__(self.message)


class Executor(Protocol):
    """Computes a model step by step.  `allocate` is called once, before the first step."""

    info: ModelInfo
    capabilities: Capabilities

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        """Create the paged KV cache that later batches use.

        `num_states` is passed only if the layout has states, `num_window_blocks` only if layers
        have a sliding window.  With 0 window blocks those layers keep the KV of every token.
        """

    def forward(self, batch: Batch) -> Any:
        """Compute the batch, write its KV, return the logits of `sample_rows` for `sample`.

        The logits are valid until the next `forward`.

        Raises:
            SequenceFailed: One of the sequences cannot be computed.
        """

    def sample(self, logits: Any, batch: Batch) -> list[SampledToken]:
        """Sample one token per row of `sample_rows`; a pure function of logits and `Sampling`.

        Raises:
            SequenceFailed: No token is allowed next in one of the sequences.
        """

    def shutdown(self) -> None:
        """Free the KV cache and the weights."""


@runtime_checkable
class Scorer(Protocol):
    """An optional capability: prompt logprobs.

    `forward` then computes the logits of `score_rows` as well as those of `sample_rows`.
    """

    def score(self, logits: Any, batch: Batch) -> list[bytes]:
        """Return the logprobs of each of the batch's scorings, packed as in `wire.logprobs`."""


@runtime_checkable
class Structurer(Protocol):
    """An optional capability: structured output.

    `sample` then chooses only tokens that `Sampling.structured` allows.
    """

    def structured(
        self, structure: Structure, prompt_len: int, tenant: int = 0, cache_salt: str = ""
    ) -> Structured:
        """Start to compile a structure for a response; tenants share the threads fairly.

        The result `is_ready` when compilation ends; it has a `problem` if the structure is invalid.
        A cached result is reused for an equal `cache_salt` only.
        """


@runtime_checkable
class Preparer(Protocol):
    """An optional capability: compile kernels and capture CUDA graphs before the first request."""

    def prepare(self) -> int:
        """Compile kernels and capture CUDA graphs, once, after `allocate`.

        Returns:
            How many tokens the warmup has to prefill, so that the other kernels are compiled too.
        """


# Waits for a step that a device is computing, and returns one token for each sampled row.  May be
# called once.
Drawn = Callable[[], list[SampledToken]]


@runtime_checkable
class Drawer(Protocol):
    """An optional capability: steps can be started before the previous step's tokens are read.

    `forward` and `draw` only start a step on the device, which runs steps and KV copies in the
    order of their start.  In `token_ids` of the next step, -1 - r stands for the token of row r of
    the last `draw`.
    """

    def can_draw(self, batch: Batch) -> bool:
        """Return whether the device can sample all tokens of the batch without the host.

        False if a row might have no allowed token: `sample` would then raise `SequenceFailed`.
        """

    def draw(self, logits: Any, batch: Batch) -> Drawn:
        """Start to sample the tokens that `sample` would return; only if `can_draw(batch)`."""
