"""Rectangles of KV as tests name them: of all heads of one group of layers."""

from __future__ import annotations

from wire.layout import KVLayout
from wire.transfer import Rectangle


def whole(layout: KVLayout, token_start: int, num_tokens: int, group: int = 0) -> Rectangle:
    """All layers of some tokens."""
    num_layers = layout.groups[group].num_layers
    return part(layout, 0, num_layers, token_start, num_tokens, group)


def part(
    layout: KVLayout,
    layer_start: int,
    num_layers: int,
    token_start: int,
    num_tokens: int,
    group: int = 0,
) -> Rectangle:
    """Some layers of some tokens."""
    return Rectangle(
        group,
        range(layer_start, layer_start + num_layers),
        range(layout.groups[group].num_heads),
        range(token_start, token_start + num_tokens),
    )
