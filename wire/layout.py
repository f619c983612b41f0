"""The KV layout: a model's groups of layers, and what a transfer sends of each.  SPEC 6.1, 6.2.

All layers of a group have the same shape.  A layer stores either keys and values for each token
(`KVGroup`) or a recurrent state of fixed size for the whole sequence (`StateGroup`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from wire.maps import Map

# One layer at one position is never split by tokens or layers, so it must fit into a segment.
MAX_LAYER_BYTES: Final = 4 << 20
MAX_GROUPS: Final = 16
_SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}

Layers = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Dtype = Annotated[str, msgspec.Meta(pattern=r"^(float32|bfloat16|float16|uint8)\Z")]


class KVGroup(Map, frozen=True, kw_only=True, tag_field="kind", tag="kv"):
    """Attention layers: they store keys and values for each token, or for a sliding window.

    `window` is the number of positions a query attends to, including its own.  `value_dim` is 0 if
    only keys are stored (latent attention).
    """

    num_layers: Layers
    num_kv_heads: Heads
    key_dim: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    value_dim: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    dtype: Dtype
    window: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None

    def __post_init__(self) -> None:
        _check(self)

    def __str__(self) -> str:
        dims = "{0}" if self.key_dim == self.value_dim else "({0} + {1})"
        window = "" if self.window is None else f" in a window of {self.window}"
        return (
            f"{self.num_layers} layers x {self.num_kv_heads} heads x "
            f"{dims.format(self.key_dim, self.value_dim)} of {self.dtype}{window}"
        )

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads

    @property
    def head_bytes(self) -> int:
        """Size in bytes of the KV of one head, token and layer."""
        return (self.key_dim + self.value_dim) * _SIZES[self.dtype]

    def sent(self, cached_tokens: int, num_tokens: int) -> range:
        """Return which of `num_tokens` tokens to send if the receiver has `cached_tokens`."""
        first = cached_tokens
        if self.window is not None:
            first = max(first, num_tokens - self.window + 1)
        return range(first, num_tokens)


class StateGroup(Map, frozen=True, kw_only=True, tag_field="kind", tag="state"):
    """Recurrent and convolutional layers: they store one state for the whole sequence.

    The state can be sharded into `num_heads` equal parts; 1 means that it cannot be sharded.
    """

    num_layers: Layers
    num_heads: Heads
    head_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYER_BYTES)]

    def __post_init__(self) -> None:
        _check(self)

    def __str__(self) -> str:
        return f"{self.num_layers} states x {self.num_heads} heads x {self.head_bytes} bytes"

    def sent(self, cached_tokens: int, num_tokens: int) -> range:
        """Return an empty range that starts at the position of the state, after the last token.

        A state is sent whole, regardless of how many tokens the receiver has cached.
        """
        return range(num_tokens, num_tokens)


Group = KVGroup | StateGroup


class KVLayout(Map, frozen=True, kw_only=True):
    """The groups of layers of a model, in an order that all workers of a cluster share.

    Each layer of the model is in one group.  Within a group, layers are in the model's order.
    """

    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVLayout:
        """Return the layout of a model with identical full-attention layers."""
        group = KVGroup(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            dtype=dtype,
        )
        return cls(groups=(group,))

    def __str__(self) -> str:
        return " and ".join(map(str, self.groups))

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return tuple(group for group in self.groups if isinstance(group, KVGroup))

    @property
    def token_bytes(self) -> int:
        """Size in bytes of one token's KV, summed over all attention layers."""
        return sum(group.num_layers * layer_bytes(group) for group in self.kv_groups)

    @property
    def state_bytes(self) -> int:
        """Size in bytes of one sequence's recurrent states, summed over all layers."""
        states = (group for group in self.groups if isinstance(group, StateGroup))
        return sum(group.num_layers * layer_bytes(group) for group in states)

    @property
    def piece_bytes(self) -> int:
        """Size in bytes of the largest unit that is never split: one layer at one position."""
        return max(layer_bytes(group) for group in self.groups)

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct sliding-window sizes in tokens, in ascending order."""
        sizes = {group.window for group in self.kv_groups if group.window is not None}
        return tuple(sorted(sizes))

    @property
    def has_state(self) -> bool:
        return any(isinstance(group, StateGroup) for group in self.groups)

    def transfer_bytes(self, num_tokens: int, cached_tokens: int = 0) -> int:
        """Return how many bytes a transfer sends if the receiver has `cached_tokens` cached."""
        if cached_tokens == num_tokens:
            return 0
        return sum(
            group.num_layers
            * layer_bytes(group)
            * (len(group.sent(cached_tokens, num_tokens)) if isinstance(group, KVGroup) else 1)
            for group in self.groups
        )


def layer_bytes(group: Group) -> int:
    """Return the size in bytes of one layer at one position, including all heads."""
    return group.num_heads * group.head_bytes


def _check(group: Group) -> None:
    if layer_bytes(group) > MAX_LAYER_BYTES:
        raise ValueError(
            f"a layer has {layer_bytes(group)} bytes at one position, over {MAX_LAYER_BYTES}"
        )
