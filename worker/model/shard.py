"""Pipeline and tensor parallelism: the part of a model that each process stores and computes.

Layers are divided into pipeline stages, and each stage into tensor-parallel shards as in Megatron.
Matrices that read hidden states (query, key and value; gate and up) are split by output, and those
that add to hidden states (o; down) by input, so shards only need to all-reduce their results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from wire.process.model import ModelError
from worker.model.config import LayerConfig, ModelConfig
from worker.model.families import DeltaHeads

# The unit by which checkpoint tensors are split, keyed by the last part of their names.  All other
# tensors, such as the routers of experts, are replicated in every shard.
DIVIDED_BY: Final = {
    "q_proj": "heads",
    "k_proj": "kv_heads",
    "v_proj": "kv_heads",
    "o_proj": "heads",
    "sinks": "sinks",
    "gate_proj": "inner",
    "up_proj": "inner",
    "gate_up_proj": "pairs",
    "down_proj": "inner",
    "embed_tokens": "tokens",
    "lm_head": "tokens",
    "in_proj_qkvz": "key_heads",
    "in_proj_ba": "key_heads",
    "conv1d": "key_heads",
    "A_log": "key_heads",
    "dt": "key_heads",  # dt_bias
    "out_proj": "key_heads",
}
# These matrices are split by input: each shard computes a summand of every output.
SUMMED: Final = ("o_proj", "down_proj", "out_proj")
_PART = re.compile(r"(\w+?)(\.weight|\.bias|_bias)?$")


class Cut(NamedTuple):
    """The part of a checkpoint tensor that a shard loads: some indices of one dimension.

    Attributes:
        dim: That dimension, negative, because stacked experts have an extra first dimension.
        kept: The indices that the shard loads.
        length: The size of the dimension in the checkpoint.
        further: More ranges of indices; in the shard's tensor they follow `kept`.
    """

    dim: int
    kept: range
    length: int
    further: tuple[range, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor-parallel shard `rank` of `size`, within pipeline stage `stage` of `stages`."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1

    @classmethod
    def of_process(cls, number: int, size: int, stages: int) -> Shard:
        """Return the shard that process `number` computes; process 0 is the leader.

        The leader is in the last stage, so that logits, much larger than token ids, stay there.
        """
        return cls(number % size, size, stages - 1 - number // size, stages)

    @property
    def process(self) -> int:
        return (self.stages - 1 - self.stage) * self.size + self.rank

    @property
    def is_whole(self) -> bool:
        return self.size == self.stages == 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def arithmetic(self) -> str:
        """A suffix for `arithmetic_of`, because sums round differently in shards."""
        return f" in {self.size} shards" if self.size > 1 else ""

    def layers(self, num_layers: int) -> range:
        """Return the layers of the stage; the last stages, with the output head, have fewer."""
        first, end = (-(-num_layers * it // self.stages) for it in (self.stage, self.stage + 1))
        return range(first, end)

    def heads(self, num_heads: int) -> range:
        own = num_heads // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return the KV heads of the shard; with fewer heads than shards, they are replicated."""
        first = self.rank * num_kv_heads // self.size
        return range(first, first + max(1, num_kv_heads // self.size))

    def tokens(self, vocab_size: int) -> range:
        """Return the token ids whose rows of the embedding and head the shard stores."""
        rows = self.num_rows(vocab_size)
        return range(min(self.rank * rows, vocab_size), min((self.rank + 1) * rows, vocab_size))

    def num_rows(self, vocab_size: int) -> int:
        """Return the number of rows of the embedding and head in every shard, with padding."""
        return -(-vocab_size // self.size)

    def rows(self, token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return each token's row in this shard, or -1 if another shard stores it."""
        kept = self.tokens(vocab_size)
        rows = token_ids - kept.start
        return rows.masked_fill_((rows < 0) | (rows >= len(kept)), -1)

    def of(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of this shard's part of a model; `vocab_size` is unchanged.

        Raises:
            ModelError: The model cannot be divided like this; the message lists sizes that work.
        """
        self._check(config)
        own = self.layers(config.num_layers)
        return replace(
            config,
            layers=tuple(self._divided(it) for it in config.layers[own.start : own.stop]),
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    def cut(self, config: ModelConfig, name: str) -> Cut | None:
        """Return the part of a checkpoint tensor that the shard loads; None for all of it."""
        found = _PART.search(name)
        assert found is not None
        part, kind = found.groups()
        if self.size == 1 or part not in DIVIDED_BY:
            return None
        # The outputs are the last dimension of biases, and of stacked (transposed) experts.
        outputs, inputs = (-2, -1) if kind == ".weight" else (-1, -2)
        if part in SUMMED and kind in (".bias", "_bias"):
            # Only rank 0 adds the bias, because outputs are all-reduced.
            length = config.hidden_size
            return Cut(outputs, range(length if self.rank == 0 else 0), length)
        if DIVIDED_BY[part] == "tokens":
            return Cut(outputs, self.tokens(config.vocab_size), config.vocab_size)
        layer = config.layers[int(name.split(".")[2])]
        if layer.delta is not None and DIVIDED_BY[part] == "key_heads":
            return self._cut_delta(layer.delta, part, inputs if part in SUMMED else outputs)
        inner = config.intermediate_size_of(layer)
        if layer.experts is not None and ".shared_expert." in name:
            inner = layer.experts.shared_size
        query_width = 2 if config.has_output_gate and part == "q_proj" else 1
        count, width = {
            "heads": (config.num_heads, query_width * config.head_dim),
            "sinks": (config.num_heads, 1),
            "kv_heads": (config.num_kv_heads, config.head_dim),
            "inner": (inner, 1),
            "pairs": (inner, 2),
        }[DIVIDED_BY[part]]
        first, own = self.rank * count // self.size, max(1, count // self.size)
        dim = inputs if part in SUMMED else outputs
        return Cut(dim, range(first * width, (first + own) * width), count * width)

    def _cut_delta(self, heads: DeltaHeads, part: str, dim: int) -> Cut:
        values = heads.values_per_key * heads.value_dim
        own = self.heads(heads.num_heads)
        if part == "conv1d":  # rows: the queries of all heads, then their keys, then their values
            first, *further = (
                _head_indices(own, width, before * heads.num_heads)
                for width, before in (
                    (heads.key_dim, 0),
                    (heads.key_dim, heads.key_dim),
                    (values, 2 * heads.key_dim),
                )
            )
            return Cut(-3, first, heads.num_heads * heads.channels, tuple(further))
        width = {
            "in_proj_qkvz": heads.channels + values,
            "in_proj_ba": 2 * heads.values_per_key,
            "out_proj": values,
        }.get(part, heads.values_per_key)
        return Cut(dim, _head_indices(own, width), heads.num_heads * width)

    def _divided(self, layer: LayerConfig) -> LayerConfig:
        experts, delta = layer.experts, layer.delta
        if experts is not None:
            experts = replace(
                experts,
                intermediate_size=experts.intermediate_size // self.size,
                shared_size=experts.shared_size // self.size,
            )
        if delta is not None:
            delta = replace(delta, num_heads=delta.num_heads // self.size)
        return replace(layer, experts=experts, delta=delta)

    def _check(self, config: ModelConfig) -> None:
        if self.stages > config.num_layers:
            raise ModelError(
                f"num_hidden_layers is {config.num_layers}, too few for {self.stages} stages; "
                f"--pipeline-parallel may be 1 to {config.num_layers} for this model"
            )
        stages = [replace(self, stage=it).layers(config.num_layers) for it in range(self.stages)]
        if not all(any(config.layers[it].delta is None for it in stage) for stage in stages):
            raise ModelError(
                f"--pipeline-parallel {self.stages} leaves a stage without attention; lower it"
            )
        problem = _undivided(config, self.size)
        if problem is not None:
            sizes = [it for it in range(1, config.num_heads + 1) if _undivided(config, it) is None]
            raise ModelError(
                f"{problem}; --tensor-parallel may be {', '.join(map(str, sizes))} for this model"
            )


WHOLE: Final = Shard()


def _head_indices(heads: range, width: int, before: int = 0) -> range:
    """Return the indices of these heads, with `width` indices each, after `before` other ones."""
    return range(before + heads.start * width, before + heads.stop * width)


def _undivided(config: ModelConfig, size: int) -> str | None:
    """Return the error text if a model size does not divide into `size` shards, else None."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        return f"num_attention_heads is {heads}, no multiple of {size} shards"
    if kv_heads % size and size % kv_heads:
        return (
            f"num_key_value_heads is {kv_heads}, neither a multiple nor a divisor of {size} shards"
        )
    for layer in config.layers:
        inner, of = config.intermediate_size_of(layer), " of experts" if layer.experts else ""
        if inner % size:
            return f"intermediate_size{of} is {inner}, no multiple of {size} shards"
        if layer.experts is not None and layer.experts.shared_size % size:
            shared = layer.experts.shared_size
            return f"shared_expert_intermediate_size is {shared}, no multiple of {size} shards"
        if layer.delta is not None and layer.delta.num_heads % size:
            number = layer.delta.num_heads
            return f"linear_num_key_heads is {number}, no multiple of {size} shards"
    return None
