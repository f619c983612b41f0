"""Computes which part of a model's KV each process of the model stores."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from wire.layout import Group, KVGroup, KVLayout
from wire.transfer import Rectangle
from worker.compute.pool_shape import layers_by_window
from worker.model.config import ModelConfig
from worker.model.shard import Shard


class Part(NamedTuple):
    """The KV that one process stores: the same heads of adjacent layers, in each group of layers.

    Attributes:
        layout: The layout of this part, without groups that have no layer in it.
        layers: The range of layers within each group, by the group's index in the whole model.
        heads: The range of heads within each group, by the group's index in the whole model.
    """

    process: int
    layout: KVLayout
    layers: dict[int, range]
    heads: dict[int, range]

    @classmethod
    def of(cls, layout: KVLayout, config: ModelConfig, shard: Shard) -> Part:
        stage, kv_heads = shard.layers(config.num_layers), shard.kv_heads(config.num_kv_heads)
        layers, heads, groups = {}, {}, list[Group]()
        for index, (group, of_model) in enumerate(zip(layout.groups, _layers(config), strict=True)):
            offsets = [offset for offset, layer in enumerate(of_model) if layer in stage]
            if not offsets:
                continue
            layers[index], own = range(offsets[0], offsets[-1] + 1), {"num_layers": len(offsets)}
            if isinstance(group, KVGroup):
                heads[index], own["num_kv_heads"] = kv_heads, len(kv_heads)
            else:
                heads[index] = shard.heads(group.num_heads)
                own["num_heads"] = len(heads[index])
            groups.append(structs.replace(group, **own))
        return cls(shard.process, KVLayout(groups=tuple(groups)), layers, heads)

    def share(self, rectangle: Rectangle) -> Rectangle | None:
        """Return what this part stores of a rectangle of the whole model, or None for nothing."""
        group, layers, heads, tokens = rectangle
        if group not in self.layers:
            return None
        layers, heads = _common(layers, self.layers[group]), _common(heads, self.heads[group])
        return Rectangle(group, layers, heads, tokens) if layers and heads else None

    def own(self, share: Rectangle) -> Rectangle:
        """Convert a share from group, layer and head numbers of the model to those of this part."""
        group, layers, heads, tokens = share
        return Rectangle(
            list(self.layers).index(group),
            _moved(layers, -self.layers[group].start),
            _moved(heads, -self.heads[group].start),
            tokens,
        )


def _layers(config: ModelConfig) -> list[list[int]]:
    """Return the layer numbers of each group in the model's layout (`torch.layout_of`)."""
    with_kv = [index for index, layer in enumerate(config.layers) if layer.delta is None]
    with_state = [index for index, layer in enumerate(config.layers) if layer.delta is not None]
    groups = layers_by_window(config.windows).values()
    groups_of_model = [[with_kv[offset] for offset in group] for group in groups]
    return [*groups_of_model, with_state] if with_state else groups_of_model


def parts_of(layout: KVLayout, config: ModelConfig, size: int, stages: int) -> list[Part]:
    """Return the parts of all processes of a model, in the order of the processes."""
    shards = (Shard.of_process(it, size, stages) for it in range(size * stages))
    return [Part.of(layout, config, shard) for shard in shards]


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _moved(one: range, by: int) -> range:
    return range(one.start + by, one.stop + by)
