"""The forward pass on a CPU: programs of compiled loops over packed weights.

A program is a list of operations, built once for each number of tokens; it reads and writes the
same buffers each time it runs.  A shard runs several programs with all-reduces between them.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import torch

from kernels import PagedBatch, Softmax
from kernels.cpu.attention import attend
from kernels.cpu.bfloat16_methods import Way, best_way
from kernels.cpu.inputs import StepInputs
from kernels.cpu.linear import ELEMENTS, PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import MAX_INPUTS, Int8Weight
from kernels.cpu.program import Operation
from kernels.cpu.rotary import rotate_and_append
from kernels.cpu.rowwise import embed, norm
from kernels.cpu.simd import PANEL
from kernels.cpu.work_items import WorkItems
from worker.compute.device import arithmetic_of
from worker.compute.packed import (
    Call,
    ExpertBuffers,
    Packed,
    PackedExperts,
    PackedMLP,
    Projection,
    all_reduce_calls,
    bytes_of,
    gated_rows,
    in_one_call,
)
from worker.compute.pool_shape import indices_in_pool
from worker.compute.ranks import Ranks
from worker.model.config import ModelConfig
from worker.model.rope import inverse_frequencies
from worker.model.weights import Attention, ExpertMLP, Layer, Weights

# The size of the LRU cache of programs; prompts can have any number of tokens.
MAX_PROGRAMS = 64


class CompiledTransformer:
    """The compiled forward pass on a CPU, with the attributes of `Transformer`.

    The constructor empties `weights` while it packs them layer by layer.  If `dtype` is bfloat16,
    both inputs of every matrix product are bfloat16, otherwise float32, whatever dtype stores the
    weights.  With `in_int8`, weights are quantized to int8 and only attention uses `dtype`.
    Everything else is float32.  With `ranks`, this object computes one shard of the model.
    """

    dtype = torch.float32

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        *,
        in_int8: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.device, self.kv_dtype = weights.config, weights.device, weights.kv_dtype
        config, self._ranks = self.config, ranks
        self.arithmetic = arithmetic_of(self.device, dtype)
        if dtype is torch.bfloat16:
            # The OS may disable AMX tiles, so equal processors can use different methods.
            self.arithmetic += f" {best_way().name.lower()}"
        if in_int8:
            self.arithmetic += " int8"
        if ranks is not None:
            self.arithmetic += ranks.shard.arithmetic
        in_floats = PairedWeight if dtype is torch.bfloat16 else PackedWeight
        self._packed: Packed = Int8Weight if in_int8 else in_floats
        self._layers = [_PackedLayer.of(layer, self._packed) for layer in weights.release_layers()]
        self._norm = weights.norm
        # Only the last pipeline stage has an output head.
        self._head = self._packed(weights.head) if len(weights.head) else None
        # If the head is tied to the embedding, embedding rows are read from its packed weights.
        is_tied = weights.head is weights.embed
        self._embedding = self._head if self._head is not None and is_tied else weights.embed
        # Models were trained with the scale rounded to their dtype.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self._frequencies = {
            layer.rope: inverse_frequencies(layer.rope, self.device) for layer in config.layers
        }
        num_shared = config.num_heads // config.num_kv_heads
        # Keyed by whether layers have a window: those have their own pool, tables and slots.
        self._items = {
            it: WorkItems(num_shared) for it in {own.window is not None for own in config.layers}
        }
        self._dtype = dtype
        self._buffers = _Buffers(config, 0, self._packed, dtype)
        self.parameter_bytes = self._int8_bytes() if in_int8 else weights.parameter_bytes
        self._inputs = self._inputs_for(0)
        self._window_slots = torch.empty(0, dtype=torch.int32)
        self._logits = torch.empty(0, 0 if self._head is None else self._head.num_columns)
        self._pools: dict[bool, torch.Tensor] = {}
        self._programs: OrderedDict[tuple[int, int], Call] = OrderedDict()

    @staticmethod
    def best_dtype(config: ModelConfig) -> torch.dtype:
        """Return the fastest dtype on this processor that represents the weights exactly."""
        is_paired = config.dtype == "bfloat16" and best_way() is not Way.VECTORS
        fits = CompiledTransformer.fits(config, torch.bfloat16)
        return torch.bfloat16 if is_paired and fits else torch.float32

    @staticmethod
    def supports_layers(config: ModelConfig) -> bool:
        """Return whether compiled loops exist for all kinds of layers of this model."""
        has_shared = any(it.experts is not None and it.experts.shared_size for it in config.layers)
        return not (config.delta_layers or config.has_output_gate or has_shared)

    @staticmethod
    def fits(
        config: ModelConfig, dtype: torch.dtype, *kept: torch.dtype, in_int8: bool = False
    ) -> bool:
        """Return whether compiled loops support the model's layers, sizes and dtypes.

        Each matrix must have a multiple of PANEL output columns.  In float32 that applies to gate
        and up together, in bfloat16 and int8 to each.  `kept` are the dtypes of weights and KV.
        """
        if not CompiledTransformer.supports_layers(config):
            return False
        factor = 1 if in_int8 or dtype is torch.bfloat16 else 2
        inner = (size * factor for size in config.intermediate_sizes)
        widths = (config.head_dim, config.hidden_size, *inner)
        if in_int8 and max(*widths, config.num_heads * config.head_dim) > MAX_INPUTS:
            return False
        return not any(width % PANEL for width in widths) and all(it in ELEMENTS for it in kept)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: torch.Tensor,
        batch: PagedBatch,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step; see `worker.compute.transformer.Transformer.forward`."""
        num_tokens, num_rows = len(token_ids), len(rows)
        # Keyed by whether layers have a window, like `_items`.
        pools, batches = {False: pool}, {False: batch}
        if batch.windowed is not None:
            window_pool, window_batch = batch.windowed
            pools[True], batches[True] = window_pool, window_batch
        program = self._program(pools, num_tokens, num_rows)
        if self._ranks is not None:
            token_ids = self._ranks.shard.rows(token_ids, self.config.vocab_size)
        self._inputs.set(token_ids.int(), positions.int(), batch.slots, rows.int())
        for has_window, items in self._items.items():
            items.set(batches[has_window])
        if batch.windowed is not None:
            self._window_slots[:num_tokens] = batch.windowed.batch.slots
        program()
        logits = self._logits[:num_rows, : self.config.vocab_size]
        return logits if self._ranks is None else self._gathered(logits, self._ranks)

    def _int8_bytes(self) -> int:
        parts = {self._norm, self._head, self._embedding}  # the last two may be the same object
        return bytes_of((*parts, *self._layers))

    def _gathered(self, logits: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Gather the shards' columns of the logits in the leader."""
        vocab_size = self.config.vocab_size
        if not ranks.shard.is_last:
            return logits.new_empty(0, vocab_size)
        own = logits[:, : ranks.shard.num_rows(vocab_size)]
        return ranks.gather(own.contiguous())[:, :vocab_size]

    def _program(self, pools: dict[bool, torch.Tensor], num_tokens: int, num_rows: int) -> Call:
        self._reserve(pools, num_tokens, num_rows)
        program = self._programs.get((num_tokens, num_rows))
        if program is None:
            program = in_one_call(self._operations(num_tokens, num_rows))
            self._programs[num_tokens, num_rows] = program
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end((num_tokens, num_rows))
        return program

    def _reserve(self, pools: dict[bool, torch.Tensor], num_tokens: int, num_rows: int) -> None:
        """Allocate larger buffers if needed, and discard the programs that use the old ones."""
        if any(pool is not self._pools.get(it) for it, pool in pools.items()):
            self._programs.clear()
            self._pools = pools
        if num_tokens > self._buffers.num_tokens:
            self._programs.clear()
            self._buffers = _Buffers(self.config, num_tokens, self._packed, self._dtype)
            self._inputs = self._inputs_for(num_tokens)
            self._window_slots = torch.empty(num_tokens, dtype=torch.int32)
        if num_rows > len(self._logits):
            self._programs.clear()
            # The number of rows grows in powers of two, because sequences arrive one by one.  A
            # new buffer in each step would cost page faults: 32 rows can be a thousand pages.
            capacity = 1 << (num_rows - 1).bit_length()
            self._logits = torch.empty(capacity, self._logits.shape[1])

    def _inputs_for(self, num_tokens: int) -> StepInputs:
        return StepInputs(num_tokens, torch.stack([*self._frequencies.values()]))

    def _operations(self, num_tokens: int, num_rows: int) -> list[Operation | Call]:
        """Return the operations that compute logits from token ids."""
        config, buffers, inputs = self.config, self._buffers, self._inputs
        hidden, normed = buffers.hidden[:num_tokens], buffers.normed[:num_tokens]
        heads, attended = buffers.heads[:num_tokens], buffers.attended[:num_tokens]
        planes, added = buffers.planes[:num_tokens], buffers.added[:num_tokens]
        projected = heads.flatten(1)
        by_head = attended.view(num_tokens, config.num_heads, config.head_dim)
        slots = {False: inputs.slots[:num_tokens], True: self._window_slots[:num_tokens]}
        rotations = {
            rope: rotation[:num_tokens]
            for rope, rotation in zip(self._frequencies, inputs.rotations, strict=True)
        }
        eps = config.norm_eps
        program = [
            *(items.plan() for items in self._items.values()),
            inputs.load(num_tokens, num_rows),
            *self._begin(hidden),
        ]
        in_pool = indices_in_pool(config.windows)
        for layer, own, index in zip(self._layers, config.layers, in_pool, strict=True):
            rotation, window = rotations[own.rope], own.window
            scale = config.attention_scale * own.rope.score_factor
            has_window, query = window is not None, heads[:, : config.num_heads]
            items, pool = self._items[has_window], self._pools[has_window]
            softmax = Softmax(scale, window, sinks=layer.sinks)
            program += [
                norm(hidden, layer.attention_norm, eps, normed),
                layer.qkv.of(normed, projected),
                rotate_and_append(
                    heads, rotation, pool, index, slots[has_window], layer.qk_norm, eps
                ),
                attend(query, pool, index, items, by_head, softmax),
                *layer.o.added(attended, hidden, planes, added, eps, self._ranks),
                norm(hidden, layer.mlp_norm, eps, normed),
                *self._feed_forward(layer, num_tokens),
            ]
        return [*program, *self._end(hidden, num_rows)]

    def _begin(self, hidden: torch.Tensor) -> list[Operation | Call]:
        """Return the operations that embed tokens, or receive the previous stage's output."""
        if self._ranks is not None and not self._ranks.shard.is_first:
            return [partial(self._ranks.receive, hidden)]
        token_ids = self._inputs.token_ids[: len(hidden)]
        rows = embed(token_ids, self._embedding, hidden, self._embedding_scale)
        return [rows, *all_reduce_calls(hidden, self._ranks)]

    def _end(self, hidden: torch.Tensor, num_rows: int) -> list[Operation | Call]:
        """Return the operations that compute logits, or send hidden states to the next stage."""
        if self._head is None:
            assert self._ranks is not None
            ranks = self._ranks
            # Send a copy, because the next step overwrites these hidden states.
            return [lambda: ranks.send(hidden.clone())]
        last, rows = self._buffers.normed[:num_rows], self._inputs.rows[:num_rows]
        return [
            norm(hidden, self._norm, self.config.norm_eps, last, rows),
            self._head.times(last, self._logits[:num_rows]),
        ]

    def _feed_forward(self, layer: _PackedLayer, num_tokens: int) -> list[Operation | Call]:
        """Return the operations that add the feed-forward of the normalized rows to `hidden`."""
        config, buffers, mlp, ranks = self.config, self._buffers, layer.mlp, self._ranks
        hidden, normed = buffers.hidden[:num_tokens], buffers.normed[:num_tokens]
        if isinstance(mlp, PackedExperts):
            moe, exact_norm = buffers.experts[mlp.config], None
            if self._packed is not PackedWeight:
                exact_norm = norm(hidden, layer.mlp_norm, config.norm_eps, moe.exact[:num_tokens])
            return mlp.added(hidden, normed, exact_norm, moe, config.activation, ranks)
        wide, gated = buffers.gate_up[:num_tokens], buffers.gated[:num_tokens]
        planes, added = buffers.planes[:num_tokens], buffers.added[:num_tokens]
        return [
            *mlp.gate_up.gated(normed, wide, gated, config.activation),
            *mlp.down.added(gated, hidden, planes, added, config.norm_eps, ranks),
        ]


class _PackedLayer(NamedTuple):
    attention_norm: torch.Tensor
    qkv: Projection
    qk_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    o: Projection
    mlp_norm: torch.Tensor
    mlp: PackedMLP | PackedExperts

    @classmethod
    def of(cls, layer: Layer, packed: Packed) -> _PackedLayer:
        attention = layer.attention
        assert isinstance(attention, Attention), "`fits` is true"
        return cls(
            attention_norm=layer.attention_norm,
            qkv=Projection.packed(attention.qkv, packed),
            qk_norm=attention.qk_norm,
            sinks=attention.sinks,
            o=Projection.packed(attention.o, packed, norm=layer.attention_post_norm),
            mlp_norm=layer.mlp_norm,
            mlp=PackedExperts.of(layer.mlp, packed)
            if isinstance(layer.mlp, ExpertMLP)
            else PackedMLP.of(layer.mlp, packed, layer.mlp_post_norm),
        )


class _Buffers:
    """Intermediate results of a step of up to `num_tokens` tokens, reused in each step."""

    def __init__(
        self, config: ModelConfig, num_tokens: int, packed: Packed, dtype: torch.dtype
    ) -> None:
        num_heads, head_dim = config.num_heads, config.head_dim
        width = num_heads * head_dim
        is_dense = any(layer.experts is None for layer in config.layers)
        inner = config.intermediate_size if is_dense else 0
        self.num_tokens = num_tokens
        self.hidden = torch.empty(num_tokens, config.hidden_size)
        self.normed = packed.inputs(num_tokens, config.hidden_size)
        self.added = torch.empty(num_tokens, config.hidden_size if config.post_norms else 0)
        self.heads = torch.empty(num_tokens, num_heads + 2 * config.num_kv_heads, head_dim)
        self.gate_up = torch.empty(num_tokens, 2 * inner if packed is PackedWeight else 0)
        self.gated = gated_rows(num_tokens, inner, packed)
        kinds = {layer.experts for layer in config.layers if layer.experts is not None}
        self.experts = {
            it: ExpertBuffers(it, config.hidden_size, num_tokens, packed) for it in kinds
        }
        if packed is Int8Weight:
            kept = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
            self.attended = torch.empty(num_tokens, width, dtype=kept)
            self.planes = packed.inputs(num_tokens, max(width, inner))
        else:
            self.attended = packed.inputs(num_tokens, width)
            self.planes = torch.empty(num_tokens, 0)
