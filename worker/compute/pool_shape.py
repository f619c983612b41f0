"""The order of layers in the two KV pools: one for sliding-window layers, one for all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wire.layout import KVGroup, KVLayout

Window = int | None


def layers_by_window(windows: Sequence[Window]) -> dict[Window, list[int]]:
    """Group a model's attention layers by window: layers without one first, then ascending."""
    groups: dict[Window, list[int]] = {}
    for window in sorted(set(windows), key=lambda it: it or 0):
        groups[window] = [layer for layer, own in enumerate(windows) if own == window]
    return groups


def indices_in_pool(windows: Sequence[Window]) -> list[int]:
    """Return the index of each attention layer in its pool."""
    order = [layer for layers in layers_by_window(windows).values() for layer in layers]
    num_whole = windows.count(None)  # layers without a window, which are first in `order`
    found = (order.index(layer) for layer in range(len(windows)))
    return [index if index < num_whole else index - num_whole for index in found]


class PoolShape(NamedTuple):
    """The shape of a pool's blocks; `first_layers` maps each group to its first layer's index."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    first_layers: dict[int, int]

    @classmethod
    def of(cls, layout: KVLayout, *, windowed: bool) -> PoolShape:
        """Return the shape of the pool for sliding-window layers (`windowed`) or of the other pool.

        Raises:
            ValueError: The layout has no KV groups, or the shapes of their heads differ.
        """
        num_layers, first_layers, kinds = 0, dict[int, int](), set[tuple[int, int, int, str]]()
        for index, group in enumerate(layout.groups):
            if isinstance(group, KVGroup):
                kinds.add((group.num_kv_heads, group.key_dim, group.value_dim, group.dtype))
                if (group.window is not None) is windowed:
                    first_layers[index] = num_layers
                    num_layers += group.num_layers
        if len(kinds) != 1:
            raise ValueError(f"{layout}: a pool has one shape of keys and values, not {len(kinds)}")
        ((num_kv_heads, key_dim, value_dim, dtype),) = kinds
        if key_dim != value_dim:
            raise ValueError(
                f"{layout}: keys of {key_dim} and values of {value_dim} do not share a pool"
            )
        return cls(num_layers, num_kv_heads, key_dim, dtype, first_layers)

    def layers(self, group: int, layers: range) -> range:
        """Convert a range of layers within a group to their indices in the pool."""
        first = self.first_layers[group]
        return range(first + layers.start, first + layers.stop)
