"""Models of any layers and heads, divided among processes in any way that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from wire.layout import KVLayout
from wire.process.model import DEMO
from wire.transfer import Rectangle
from worker.executor.torch import layout_of
from worker.model.config import ModelConfig, read_config
from worker.model.shard import Shard
from worker.parallel.partition import Part, parts_of

NUM_TOKENS = 21


class Divided(NamedTuple):
    """A model's shape and KV layout, and into how many shards and stages it is divided."""

    config: ModelConfig
    layout: KVLayout
    size: int
    stages: int

    @property
    def shards(self) -> list[Shard]:
        return [Shard.of_process(it, self.size, self.stages) for it in self.processes]

    @property
    def parts(self) -> list[Part]:
        return parts_of(self.layout, self.config, self.size, self.stages)

    @property
    def processes(self) -> range:
        return range(self.size * self.stages)


def model_of(
    windows: Sequence[int | None], *, num_kv_heads: int = 2, size: int = 1, stages: int = 1
) -> Divided:
    """Return a model whose layers have these windows, so divided."""
    demo = read_config(DEMO)
    config = replace(
        demo,
        layers=tuple(replace(demo.layers[0], window=window) for window in windows),
        num_heads=num_kv_heads * size,
        num_kv_heads=num_kv_heads,
        head_dim=2,
        intermediate_size=12,
    )
    return Divided(config, layout_of(config, torch.float32), size, stages)


@st.composite
def divided(draw: st.DrawFn) -> Divided:
    windows = draw(st.lists(st.sampled_from([None, 3, 9]), min_size=1, max_size=6))
    num_kv_heads, size = draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (2, 4), (1, 3), (6, 3)]))
    stages = draw(st.integers(1, len(windows)))
    return model_of(windows, num_kv_heads=num_kv_heads, size=size, stages=stages)


@st.composite
def rectangles(draw: st.DrawFn, layout: KVLayout) -> Rectangle:
    group = draw(st.integers(0, len(layout.groups) - 1))
    sizes = layout.groups[group].num_layers, layout.groups[group].num_heads, NUM_TOKENS
    starts = [draw(st.integers(0, size - 1)) for size in sizes]
    ends = [draw(st.integers(a + 1, b)) for a, b in zip(starts, sizes, strict=True)]
    return Rectangle(group, *map(range, starts, ends))
