"""The contract of all backends: notation, shapes and dtypes of the operators, and their checks.

Notation: T tokens of S sequences in one step, N blocks, L layers, Hq query heads, Hkv KV heads (Hkv
divides Hq), B tokens per block, D dimensions per head, M columns of the block tables.

    pool   [N, L, 2, Hkv, B, D]  the KV of L layers; axis 2 is key, value; contiguous.  A block's
                                 layers are adjacent, so a block is one contiguous range of bytes.
    slot   block * B + offset    the position of a token's KV, the same in every layer of a pool.
    wire   [l, 2, Hkv, t, D]     l layers by t tokens of one sequence, whatever the block size.

A block table maps logical block i of a sequence (tokens [i * B, (i + 1) * B)) to a block of the
pool.  Slots to which no token was appended may contain anything, NaN included, without effect.  The
checks read only `.shape`, `.dtype` and CPU integers, so they need no device synchronisation, and
this module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

POOL_RANK = 6
# The settings of one row for `kernels.draw`.
#
# The CPU and the GPU draw the same token from the same float32 logits, because no result depends on
# the order in which numbers are added or compared:
#
#   order      Logits are ordered as int32 by their bits; -0 equals 0, and NaN is the largest.
#   x          (logit - largest) * min(log2(e) / temperature, largest float64), in float64, each
#              operation rounded; -64 where that is smaller or NaN.
#   weight     2^x in units of 2^-42, rounded to the nearest int64 by the same float64 polynomial
#              with fused multiply-adds on both devices.  Sums of weights are exact.
#   threshold  For top_k, the largest logit such that k logits are not below it; for top_p, such
#              that the weights not below it sum to at least max(1, floor(top_p * sum)).  Both are
#              found by radix select.  For min_p, the weight floor(min_p * 2^42).
#   token      The first at which the cumulative weight exceeds floor(uniform * sum); the last
#              allowed one if there is no weight, because the largest logit is infinite or NaN.
#
# Shares of a sum are products in float64.
SAMPLING = np.dtype(
    [
        ("temperature", np.float64),  # 0 takes the largest logit, the first of equals
        ("top_k", np.int64),  # 0 for none
        ("top_p", np.float64),  # 1 for none
        ("min_p", np.float64),  # 0 for none
        ("uniform", np.float64),  # the random number in [0, 1) that selects the token
    ]
)
# With more tokens the sum of weights could exceed an int64.
MAX_VOCABULARY = 1 << 21


class Activation(NamedTuple):
    """The gate of a feed-forward layer: x times the logistic function of linear x + cubic x^3.

    x is clamped to at most `limit`.  The factor that it multiplies is clamped to [-limit, limit],
    then `shift` is added to it.
    """

    linear: float
    cubic: float
    limit: float = math.inf
    shift: float = 0.0


SILU = Activation(1.0, 0.0)
# The tanh approximation of GELU, x (1 + tanh z) / 2, equals x times the logistic function of 2 z.
GELU_TANH = Activation(math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715)


class Softmax(NamedTuple):
    """How attention makes weights of scores.

    Attributes:
        scale: The factor of scores.
        window: The query at position p sees positions (p - window, p]; None: [0, p].
        cap: If given, a scaled score s becomes cap * tanh(s / cap).
        sinks: [Hq] float32 on the pool's device: an additional score of each head, which is not
            capped and has no value; None for no sinks.
    """

    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: torch.Tensor | None = None


class Rectangle(NamedTuple):
    """A part of one sequence's KV: ranges of layers, KV heads and tokens."""

    layers: range
    heads: range
    tokens: range


class KernelError(Exception):
    """A kernel cannot run with these arguments or on this machine."""


class ShapeError(KernelError, ValueError):
    """Shapes, dtypes or ranges of arguments do not fit each other; nothing was written."""


class Run(NamedTuple):
    """Consecutive tokens [start, stop) of one sequence in a step, and the slots of its state.

    The state is read from slot `before`, None at the beginning of a sequence, and written to
    `after`.
    """

    start: int
    stop: int
    before: int | None
    after: int


class Singles(NamedTuple):
    """Runs of one token that do not continue each other: rows, state slots, and which are new."""

    rows: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    is_new: torch.Tensor


@dataclass(frozen=True, slots=True)
class States:
    """The recurrent states of a step: their pool, and the runs of tokens that change them.

    Attributes:
        pool: [slots, layers, heads, F] float32: F numbers are the state of one head in one layer.
        longer: The other runs, ordered so that each state is written before it is read.
    """

    pool: torch.Tensor
    singles: Singles
    longer: tuple[Run, ...]


class Windowed(NamedTuple):
    """The pool of the sliding-window layers, and a step's batch in it."""

    pool: torch.Tensor
    batch: PagedBatch


class Scratch:
    """Values that backends derive from a batch once for all layers: one object of each type."""

    def __init__(self) -> None:
        self._kept: dict[type[Any], Any] = {}

    def of(self, kind: type[T]) -> T:
        """Return the object of this type; the first time, construct it without arguments."""
        if kind not in self._kept:
            self._kept[kind] = kind()
        kept: T = self._kept[kind]
        return kept


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """The positions of one step's tokens in the pool; created once per step, used by every layer.

    All tensors are int32 in CPU memory, whatever the pool's device: a backend uploads what it needs
    once and keeps it in `scratch`.

    Attributes:
        slots: [T] slot of each token.
        query_starts: [S + 1]; sequence s has the tokens [query_starts[s], query_starts[s + 1]).
        context_lens: [S] tokens of each sequence, this step's included; its queries are the last.
        block_tables: [S, M] physical block of each logical block; columns past the end are ignored.
        states: The states of recurrent layers; None if there are no such layers.
        windowed: The batch of sliding-window layers, which have their own pool; None if there are
            no such layers.  Its tables have arbitrary entries for blocks that no query sees.
        scratch: Values that backends derived from the other fields.
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    states: States | None = None
    windowed: Windowed | None = None
    scratch: Scratch = field(default_factory=Scratch)


class Backend(Protocol):
    """The operators of one device type; their arguments were checked before.

    `kernels` documents them, and `kernels.reference` has their signatures.
    """

    def check_pool(self, *args: Any, **kwargs: Any) -> None: ...
    def rotate_and_append(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...
    def paged_attention(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...
    def pack_kv(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...
    def unpack_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def rms_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...
    def add_rms_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...
    def gate(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...
    def route(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
    def expert_mlp(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...
    def draw(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...


def check_heads(
    heads: torch.Tensor,
    rotation: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    norm: torch.Tensor | None,
) -> None:
    """Raise ShapeError unless heads are [T, Hq + 2 Hkv, D], and rotation and norm fit them."""
    _check_pool(pool, layer)
    num_tokens, num_kv_heads, head_dim = batch.slots.shape[0], pool.shape[3], pool.shape[5]
    if heads.ndim != 3 or heads.shape[0] != num_tokens or heads.shape[2] != head_dim:
        expected = f"[T, Hq + 2 Hkv, D] = [{num_tokens}, Hq + {2 * num_kv_heads}, {head_dim}]"
        raise ShapeError(f"heads are {tuple(heads.shape)}, not {expected}")
    _check_shared(heads.shape[1] - 2 * num_kv_heads, num_kv_heads)
    angles = (num_tokens, 2, head_dim // 2)
    if tuple(rotation.shape) != angles:
        raise ShapeError(f"rotation is {tuple(rotation.shape)}, not [T, 2, D / 2] = {angles}")
    weights = (heads.shape[1] - num_kv_heads, head_dim)
    if norm is not None and tuple(norm.shape) != weights:
        raise ShapeError(f"norm is {tuple(norm.shape)}, not [Hq + Hkv, D] = {weights}")


def check_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, batch: PagedBatch, softmax: Softmax
) -> None:
    """Raise ShapeError unless query is [T, Hq, D], sinks [Hq], and the batch's arrays fit."""
    _check_pool(pool, layer)
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    _, window, cap, sinks = softmax
    if query.ndim != 3 or query.shape[0] != batch.slots.shape[0] or query.shape[2] != head_dim:
        expected = f"[T, Hq, D] = [{batch.slots.shape[0]}, Hq, {head_dim}]"
        raise ShapeError(f"query is {tuple(query.shape)}, not {expected}")
    _check_shared(query.shape[1], num_kv_heads)
    num_sequences = batch.context_lens.shape[0]
    if batch.query_starts.shape[0] != num_sequences + 1:
        raise ShapeError(f"query_starts has {batch.query_starts.shape[0]} entries, not S + 1")
    if batch.block_tables.ndim != 2 or batch.block_tables.shape[0] != num_sequences:
        raise ShapeError(f"block_tables is {tuple(batch.block_tables.shape)}, not [S, M]")
    if window is not None and window < 1:
        raise ShapeError(f"window is {window}, not None or >= 1")
    if cap is not None and not 0 < cap < math.inf:
        raise ShapeError(f"cap is {cap}, not None or a positive number")
    if sinks is not None and (
        sinks.shape != query.shape[1:2]
        or str(sinks.dtype) != "torch.float32"
        or not sinks.is_contiguous()
        or sinks.device != pool.device
    ):
        found = f"{sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        wanted = f"torch.float32 [Hq] = [{query.shape[1]}] on {pool.device}, in one run"
        raise ShapeError(f"sinks are {found}, not {wanted}")


def check_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Raise ShapeError unless x is [T, K], gate_up [E, 2 N, K], down [E, K, N], and biases fit."""
    if experts.ndim != 2 or experts.shape != shares.shape or len(experts) != len(x):
        found = f"{tuple(experts.shape)} and {tuple(shares.shape)}"
        raise ShapeError(f"experts and shares are {found}, not both [T, top_k], T = {len(x)}")
    num_experts, width, size = down.shape
    if x.shape[1] != width or tuple(gate_up.shape) != (num_experts, 2 * size, width):
        found = f"{tuple(x.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}"
        raise ShapeError(f"x, gate_up and down are {found}, not [T, K], [E, 2 N, K] and [E, K, N]")
    if biases is not None:
        shapes = [tuple(bias.shape) for bias in biases]
        if shapes != [(num_experts, 2 * size), (num_experts, width)]:
            raise ShapeError(f"biases are {shapes}, not [E, 2 N] and [E, K]")


def check_draw(
    logits: torch.Tensor, settings: torch.Tensor | None, allowed: torch.Tensor | None
) -> None:
    """Raise ShapeError unless logits are [R, V], and settings and allowed have R rows that fit.

    Both must be contiguous: `settings` rows of SAMPLING as int64, `allowed` rows of int32.
    """
    num_rows, size = logits.shape
    if not 1 <= size <= MAX_VOCABULARY:
        raise ShapeError(f"logits are of {size} tokens, not 1 to {MAX_VOCABULARY}")
    for name, tensor, dtype, width in (
        ("settings", settings, "int64", SAMPLING.itemsize // 8),
        ("allowed", allowed, "int32", None),
    ):
        if tensor is None:
            continue
        columns = tensor.shape[-1] if width is None else width
        expected = (num_rows, columns)
        if tuple(tensor.shape) != expected or str(tensor.dtype) != f"torch.{dtype}":
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ShapeError(f"{name} is {found}, not torch.{dtype} {list(expected)}")
        if not tensor.is_contiguous() or tensor.device != logits.device:
            raise ShapeError(f"{name} is not contiguous on {logits.device}, as the logits are")


def check_rectangle(pool: torch.Tensor, block_table: Sequence[int], rectangle: Rectangle) -> None:
    """Raise ShapeError unless layers, heads and tokens lie in the pool and the table's blocks."""
    _check_pool(pool, 0)
    num_blocks, num_layers, _, num_heads, block_size, _ = pool.shape
    layers, heads, tokens = rectangle
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= num_layers:
        raise ShapeError(f"layers {layers} are not within the pool's {num_layers}")
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= num_heads:
        raise ShapeError(f"heads {heads} are not within the pool's {num_heads}")
    if tokens.step != 1 or not 0 <= tokens.start < tokens.stop:
        raise ShapeError(f"tokens {tokens} are not a range of at least one token")
    if tokens.stop > len(block_table) * block_size:
        held = f"{len(block_table)} blocks of {block_size}"
        raise ShapeError(f"tokens {tokens} lie beyond the sequence's {held}")
    used = block_table[tokens.start // block_size : -(-tokens.stop // block_size)]
    if min(used) < 0 or max(used) >= num_blocks:
        raise ShapeError(f"the block table names blocks outside the pool's {num_blocks}")


def segment_shape(pool: torch.Tensor, rectangle: Rectangle) -> tuple[int, int, int, int, int]:
    """Return [l, 2, h, t, D]."""
    layers, heads, tokens = rectangle
    return len(layers), 2, len(heads), len(tokens), pool.shape[5]


def check_segment(pool: torch.Tensor, rectangle: Rectangle, segment: torch.Tensor) -> None:
    """Raise ShapeError unless the segment is [l, 2, h, t, D]."""
    expected = segment_shape(pool, rectangle)
    if tuple(segment.shape) != expected:
        raise ShapeError(f"the segment is {tuple(segment.shape)}, not {expected}")


def _check_pool(pool: torch.Tensor, layer: int) -> None:
    if pool.ndim != POOL_RANK or pool.shape[2] != 2:
        raise ShapeError(f"the pool is {tuple(pool.shape)}, not [N, L, 2, Hkv, B, D]")
    if not 0 <= layer < pool.shape[1]:
        raise ShapeError(f"layer {layer} is not one of the pool's {pool.shape[1]}")


def _check_shared(num_heads: int, num_kv_heads: int) -> None:
    if num_heads < 1 or num_heads % num_kv_heads:
        raise ShapeError(f"{num_heads} query heads do not share {num_kv_heads} KV heads")
