"""The values in the vectors: ids, a key, layouts, and KV that differs from place to place."""

from __future__ import annotations

import msgspec

from wire.layout import KVGroup, KVLayout, StateGroup
from wire.transfer import Rectangle

# Router epoch 1 in the high half, the first attempt in the low half.
REQUEST = 1 << 32 | 1
EPOCH = 1_760_000_000_000_000_000 >> 20 << 20
MEMORY = "baton-8d0c5f2e"
# A key that everybody knows protects nothing: this one is for the vectors only.
KEY, TOKEN, SEGMENT_PORT = bytes(range(32)), bytes(range(32, 64)), 5601
LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8")
FULL = KVGroup(num_layers=1, num_kv_heads=2, key_dim=4, value_dim=2, dtype="uint8")
WINDOWED = msgspec.structs.replace(FULL, num_layers=2, window=3)
STATE = StateGroup(num_layers=2, num_heads=4, head_bytes=3)
WINDOWS = KVLayout(groups=(FULL, WINDOWED))
STATES = KVLayout(groups=(STATE, FULL))
EVERY_KIND = KVLayout(groups=(FULL, WINDOWED, STATE))


def kv_of(layout: KVLayout, rectangle: Rectangle) -> bytes:
    """KV that differs from place to place, in the order of the wire."""
    number, layers, heads, tokens = rectangle
    group = layout.groups[number]
    if isinstance(group, StateGroup):
        return bytes(
            (128 + 64 * layer + 8 * head + d) % 256
            for layer in layers
            for head in heads
            for d in range(group.head_bytes)
        )
    return bytes(
        (64 * layer + 32 * side + 16 * head + 4 * token + d + 7 * number) % 256
        for layer in layers
        for side, dim in enumerate((group.key_dim, group.value_dim))
        for head in heads
        for token in tokens
        for d in range(dim)
    )
