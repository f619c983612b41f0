"""What the engine asks of an executor: two attributes, four methods, over paged KV (seed 003).

An executor computes and nothing else: no queues, no network, no threads of its own.  The engine
calls it from one thread; only its `KVCache` is called from several.  What else seed 003 asks of its
ModelExecutor (status, metrics, warmup, prefill and decode by hand) is the same for every executor,
and `worker.engine.instrumented` adds it.
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

# A cache has room for so many states at least; a sequence that runs may need two.
MIN_STATES: Final = 16
# Memory is divided for sequences that are so many windows long, or as long as the model allows if
# that is less: for so many tokens in the other layers there is room for one window.  Shorter
# sequences run out of blocks for windows first, longer ones of the other blocks.
EXPECTED_WINDOWS: Final = 8
# However few the blocks are, there is room for the windows of so many sequences.
MIN_WINDOWS: Final = 4


def blocks_of_window(window: int, block_size: int) -> int:
    """Return the most blocks that a sequence needs for a window, the next token's included.

    One token sees `window` positions, which may begin and end inside a block; what a step computes
    of a sequence may reach into one block more.
    """
    return -(-(window - 1) // block_size) + 2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served.  `layout` is the KV layout and dtype, on the device and on the wire."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    layout: KVLayout


class Attention(StrEnum):
    """How queries share keys, what they see, and how KV is stored."""

    MULTI_HEAD = "multi_head"
    GROUPED_QUERY = "grouped_query"
    MULTI_QUERY = "multi_query"
    SLIDING_WINDOW = "sliding_window"
    PAGED = "paged"
    LINEAR = "linear"

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int) -> Attention:
        """Return how so many query heads share so many key heads."""
        if num_heads == num_kv_heads:
            return cls.MULTI_HEAD
        return cls.MULTI_QUERY if num_kv_heads == 1 else cls.GROUPED_QUERY


@dataclass(frozen=True, slots=True)
class MemoryRequirements:
    """What serving takes, in bytes.

    Attributes:
        activation_bytes_per_token: For each token of the largest step.
        kv_bytes_per_token: Of the layers that keep every token.
        state_bytes: What a sequence has at one position, in layers that keep a state.
        window_bytes_per_token: Of the layers that keep what a window reaches.
        window: The positions that the largest window sees; 0 for none.
        expected_tokens: Of a sequence; says how many windows there are beside so many tokens.
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
        """Return what a model takes whose KV has this layout."""
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
        """Return the bytes for steps of so many tokens and a cache of so many blocks."""
        activations = self.activation_bytes_per_token * max_ubatch_tokens
        cache_bytes = self.cache_bytes(num_blocks, block_size, max_ubatch_tokens)
        return self.parameter_bytes + activations + cache_bytes

    def cache_bytes(self, num_blocks: int, block_size: int, max_ubatch_tokens: int) -> int:
        """Return the bytes of so many blocks, and of windows and states beside them."""
        states = self.num_states(num_blocks, block_size) * self.state_bytes
        windowed = self.num_window_blocks(num_blocks, block_size, max_ubatch_tokens)
        kv_bytes = num_blocks * self.kv_bytes_per_token + windowed * self.window_bytes_per_token
        return kv_bytes * block_size + states

    def num_window_blocks(self, num_blocks: int, block_size: int, max_ubatch_tokens: int) -> int:
        """Return how many blocks layers with a window have beside so many of the others.

        As many as sequences of `expected_tokens` need that fill these, and what a step may need
        besides; never more than one for each block.
        """
        if self.window_bytes_per_token == 0:
            return 0
        of_sequence = blocks_of_window(self.window, block_size)
        length = -(-self.expected_tokens // block_size)
        needed = max(MIN_WINDOWS * of_sequence, -(-num_blocks * of_sequence // length))
        return min(num_blocks, needed + max_ubatch_tokens // block_size)

    def num_states(self, num_blocks: int, block_size: int) -> int:
        """Return for how many states there is room beside so many blocks.

        They take as much as the blocks, but never more than two for each block, and there are
        `MIN_STATES` at least.
        """
        if self.state_bytes == 0:
            return 0
        token_bytes = self.kv_bytes_per_token + self.window_bytes_per_token
        equal = num_blocks * block_size * token_bytes // self.state_bytes
        return max(min(equal, 2 * num_blocks), MIN_STATES)

    def __add__(self, other: MemoryRequirements) -> MemoryRequirements:
        """Return what serving two models with the same tokens takes.

        The other keeps every token in all its layers, as a draft model does.
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
        """Return how many KV blocks `memory_bytes` pay for, after everything else.

        Raises:
            ValueError: Not even one; the message says how many bytes that takes.
        """
        least = self.total(max_ubatch_tokens, 1, block_size)
        if memory_bytes < least:
            raise ValueError(f"{memory_bytes} bytes are too few for this model, it takes {least}")
        rest = memory_bytes - self.total(max_ubatch_tokens, 0, block_size)
        return self.blocks_in(rest, block_size, max_ubatch_tokens)

    def blocks_in(self, cache_bytes: int, block_size: int, max_ubatch_tokens: int) -> int:
        """Return how many blocks so many bytes pay for, with windows and states beside them."""
        # Where all layers have a window, a block is a number only.
        most = cache_bytes // max(1, self.kv_bytes_per_token * block_size)
        return bisect_right(
            range(1, most + 1),
            cache_bytes,
            key=lambda n: self.cache_bytes(n, block_size, max_ubatch_tokens),
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an executor can do; the longest sequence is `ModelInfo.max_model_len`.

    Attributes:
        attention: Every kind it computes; empty for a model without attention.
        max_batch_sequences: Most sequences in one step; None for any number.
        continuous_batching: Sequences may join while others generate.
        enough_tokens: Tokens of prompts from which on a longer step is no quicker a token: no
            further prompt begins in a step that has them.  None where the longest is the quickest.
        speculative: More than the last row of a sequence may be sampled in one step, and tokens
            may be taken back; not so of layers that keep a state.
        dtypes: Those that `dtype` may name; empty when the setting has no meaning.
        devices: Those that `device` may name; empty when the setting has no meaning.
        arithmetic: What the bits of its numbers depend on, beside the model: two workers where it
            is equal compute equal texts.  Empty when it is the same wherever this executor runs.
        num_threads: How many threads compute a step, in each process.
        num_shards: In how many processes side by side each layer is computed.
        num_stages: In how many processes after each other the layers are.
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

    def at_most(self, num_sequences: int) -> int:
        """Return how many of so many sequences may share a step."""
        return min(num_sequences, self.max_batch_sequences or num_sequences)


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The next token of one sampled row."""

    token_id: int
    logprobs: Logprobs | None = None


class SequenceFailed(Exception):
    """One sequence of a batch cannot be computed, for a reason that is its own.

    `forward`, `sample` and `score` may raise it.  The engine ends that sequence and no other, with
    an error that is not tried again elsewhere.  The step is lost for the others too: the next one
    computes their tokens again and writes their KV to the same slots.  So raising it promises
    that the KV of all earlier tokens is unchanged, that the states behind them can still be read,
    and that the device can compute another step.
    Any other exception ends the process.

    Attributes:
        index: Of the sequence in the batch, 0 to S - 1.
        message: What is wrong, cut to `MAX_MESSAGE` characters: for logs and the program that runs
            the engine.  The network is told only that the model failed.
        code: INVALID_REQUEST if what was asked for is wrong; then the client reads the message.
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

        `num_states` is given only if the layout has states: for how many there is room.  So is
        `num_window_blocks` if layers have a window: how many blocks those share.  With 0 they keep
        every token, as others do.
        """

    def forward(self, batch: Batch) -> Any:
        """Run the batch, write its KV, return logits (opaque to the engine) of `sample_rows`.

        They are good until the next `forward`, which may write where they lie.

        Raises:
            SequenceFailed: One of the sequences cannot be computed.
        """

    def sample(self, logits: Any, batch: Batch) -> list[SampledToken]:
        """Draw one token per sampled row; a pure function of logits and `Sampling`.

        Raises:
            SequenceFailed: No next token can be chosen for one of the sequences.
        """

    def shutdown(self) -> None:
        """Give back what `allocate` and loading took."""


@runtime_checkable
class Scorer(Protocol):
    """What an executor can do besides if it can give prompt logprobs.

    Its `forward` then computes the logits of `score_rows` as well as those of `sample_rows`.
    """

    def score(self, logits: Any, batch: Batch) -> list[bytes]:
        """Return the rows of each of the batch's scorings, packed as in `wire.logprobs`."""


@runtime_checkable
class Structurer(Protocol):
    """What an executor can do besides if it can hold answers to a structure.

    Its `sample` then draws only what the `structured` of a sampling allows.
    """

    def structured(self, structure: Structure, prompt_len: int, tenant: int = 0) -> Structured:
        """Return where an answer is in this structure, whose prompt has so many tokens.

        Nobody waits: it is ready later, and says then whether there is such a structure.  Tenants
        take turns at what there is to compute.
        """


@runtime_checkable
class Preparer(Protocol):
    """An optional capability: compile kernels and record steps before the first request."""

    def prepare(self) -> int:
        """Compile and record all that steps need but a prompt; called once, after `allocate`.

        Returns:
            The length in tokens of a prompt that compiles the rest: the warmup reads it next.
        """


class Drawn(Protocol):
    """Tokens that a device draws, and may not have drawn yet."""

    def tokens(self) -> list[SampledToken]:
        """Wait for the step, and return one token for each sampled row; to be called once."""


@runtime_checkable
class Drawer(Protocol):
    """An optional capability: the engine begins a step before it has read the one before.

    `forward` and `draw` only start a step on the device, which computes steps in the order of their
    start.  In `token_ids` of the next step, -1 - r stands for the token that row r of the last
    `draw` has drawn, or will.  A copy of KV that is started after a step runs after it.
    """

    def can_draw(self, batch: Batch) -> bool:
        """Whether the device can draw all tokens of the batch without the host.

        No if a row might have no allowed token, for which `sample` would fail its sequence.
        """

    def draw(self, logits: Any, batch: Batch) -> Drawn:
        """Start drawing the tokens that `sample` would return; `can_draw` has to allow it."""
