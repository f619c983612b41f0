"""The forward pass on a CPU: programs of compiled loops over packed weights.

A program is made once for a number of tokens; its operations read and write the same buffers each
time it runs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from kernels import PagedBatch
from kernels.cpu.attention import attend
from kernels.cpu.inputs import StepInputs
from kernels.cpu.linear import ELEMENTS, PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import MAX_INPUTS, Int8Weight
from kernels.cpu.program import Operation, Program
from kernels.cpu.rotary import rotate_and_append
from kernels.cpu.rows_int8 import to_planes
from kernels.cpu.rowwise import embed, norm, silu_gate
from kernels.cpu.simd import PANEL
from kernels.cpu.ways import Way, best_way
from kernels.cpu.work_items import WorkItems
from worker.model.config import ModelConfig
from worker.model.device import arithmetic_of
from worker.model.rope import inverse_frequencies
from worker.model.weights import Layer, Linear, Weights

Weight = PackedWeight | PairedWeight | Int8Weight
Packed = type[PackedWeight] | type[PairedWeight] | type[Int8Weight]
# Programs that are kept: decode steps have few numbers of tokens, prompts have any.
MAX_PROGRAMS = 64


class CompiledTransformer:
    """Computes with weights that are given away to it: it packs them layer by layer.

    In bfloat16 every matrix product has bfloat16 on both sides; in any other dtype it is float32's,
    whatever the weights are kept in.  `in_int8` the weights are rounded to 8 bits, and attention
    alone is the dtype's.  All else is float32.

    Attributes are those of `worker.model.transformer.Transformer`.
    """

    dtype = torch.float32

    def __init__(self, weights: Weights, dtype: torch.dtype, *, in_int8: bool = False) -> None:
        self.config, self.device, self.kv_dtype = weights.config, weights.device, weights.kv_dtype
        config = self.config
        self.arithmetic = arithmetic_of(self.device, dtype)
        if dtype is torch.bfloat16:
            # Of two equal processors one may be refused its tiles by the system.
            self.arithmetic += f" {best_way().name.lower()}"
        if in_int8:
            self.arithmetic += " int8"
        in_floats = PairedWeight if dtype is torch.bfloat16 else PackedWeight
        self._packed: Packed = Int8Weight if in_int8 else in_floats
        self._layers = [_PackedLayer.of(layer, self._packed) for layer in weights.release_layers()]
        self._norm = weights.norm.float()
        self._head = self._packed(weights.head)
        # The panels hold the embeddings too where the two are one.
        self._embedding = self._head if config.tied_embeddings else weights.embed
        self._frequencies = inverse_frequencies(config.rope, self.device)
        self._items = WorkItems(config.num_heads // config.num_kv_heads)
        self._dtype = dtype
        self._buffers = _Buffers(config, 0, self._packed, dtype)
        self.parameter_bytes = self._int8_bytes() if in_int8 else weights.parameter_bytes
        self._inputs = StepInputs(0, self._frequencies)
        self._logits = torch.empty(0, self._head.num_columns)
        self._pool: torch.Tensor | None = None
        self._programs: OrderedDict[tuple[int, int], Program] = OrderedDict()

    @staticmethod
    def best_dtype(config: ModelConfig) -> torch.dtype:
        """Return what this processor computes in fastest without losing what the weights say."""
        is_paired = config.dtype == "bfloat16" and best_way() is not Way.VECTORS
        fits = CompiledTransformer.fits(config, torch.bfloat16)
        return torch.bfloat16 if is_paired and fits else torch.float32

    @staticmethod
    def fits(
        config: ModelConfig, dtype: torch.dtype, *kept: torch.dtype, in_int8: bool = False
    ) -> bool:
        """Whether the loops can compute this model: its widths are whole panels.

        In bfloat16 and `in_int8` gate and up are so each by itself.  `kept` is what weights and KV
        are kept in.
        """
        inner = config.intermediate_size * (1 if in_int8 or dtype is torch.bfloat16 else 2)
        widths = (config.head_dim, config.hidden_size, inner)
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
        """Compute one step; see `worker.model.transformer.Transformer.forward`."""
        num_tokens, num_rows = len(token_ids), len(rows)
        program = self._program(pool, num_tokens, num_rows)
        self._inputs.set(token_ids.int(), positions.int(), batch.slots, rows.int())
        self._items.set(batch)
        program.run()
        return self._logits[:num_rows, : self.config.vocab_size]

    def _int8_bytes(self) -> int:
        """Return what the model takes once its matrices are int8."""
        parts = {self._norm, self._head, self._embedding}  # the last two may be one
        return sum(map(_bytes_of, parts)) + sum(
            _bytes_of(part) for layer in self._layers for part in layer
        )

    def _program(self, pool: torch.Tensor, num_tokens: int, num_rows: int) -> Program:
        self._make_room(pool, num_tokens, num_rows)
        program = self._programs.get((num_tokens, num_rows))
        if program is None:
            program = Program(self._operations(pool, num_tokens, num_rows))
            self._programs[num_tokens, num_rows] = program
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end((num_tokens, num_rows))
        return program

    def _make_room(self, pool: torch.Tensor, num_tokens: int, num_rows: int) -> None:
        """Forget the programs if what they read or write lies elsewhere from now on."""
        if pool is not self._pool:
            self._programs.clear()
            self._pool = pool
        if num_tokens > self._buffers.num_tokens:
            self._programs.clear()
            self._buffers = _Buffers(self.config, num_tokens, self._packed, self._dtype)
            self._inputs = StepInputs(num_tokens, self._frequencies)
        if num_rows > len(self._logits):
            self._programs.clear()
            # In powers of two, as sequences come one by one.  Not allocated anew in each step: 32
            # rows of a large vocabulary are a thousand pages that the system would have to clear.
            self._logits = torch.empty(1 << (num_rows - 1).bit_length(), self._head.num_columns)

    def _operations(self, pool: torch.Tensor, num_tokens: int, num_rows: int) -> list[Operation]:
        """Return the operations from token ids to logits."""
        config, buffers, inputs = self.config, self._buffers, self._inputs
        hidden, normed = buffers.hidden[:num_tokens], buffers.normed[:num_tokens]
        heads, attended = buffers.heads[:num_tokens], buffers.attended[:num_tokens]
        gate_up, gated = buffers.gate_up[:num_tokens], buffers.gated[:num_tokens]
        planes = buffers.planes[:num_tokens]
        projected = heads.flatten(1)
        by_head = attended.view(num_tokens, config.num_heads, config.head_dim)
        slots, rotation = inputs.slots[:num_tokens], inputs.rotation[:num_tokens]
        eps, scale = config.norm_eps, config.head_dim**-0.5
        program = [
            self._items.plan(),
            inputs.load(num_tokens, num_rows),
            embed(inputs.token_ids[:num_tokens], self._embedding, hidden),
        ]
        for index, layer in enumerate(self._layers):
            window = config.windows[index]
            query = heads[:, : config.num_heads]
            program += [
                norm(hidden, layer.attention_norm, eps, normed),
                layer.qkv.of(normed, projected),
                rotate_and_append(heads, rotation, pool, index, slots, layer.qk_norm, eps),
                attend(query, pool, index, self._items, by_head, scale=scale, window=window),
                *layer.o.added(attended, hidden, planes),
                norm(hidden, layer.mlp_norm, eps, normed),
                *layer.gate_up.gated(normed, gate_up, gated),
                *layer.down.added(gated, hidden, planes),
            ]
        last = buffers.normed[:num_rows]
        return [
            *program,
            norm(hidden, self._norm, eps, last, inputs.rows[:num_rows]),
            self._head.times(last, self._logits[:num_rows]),
        ]


class _Projection(NamedTuple):
    weight: Weight
    bias: torch.Tensor | None

    @classmethod
    def packed(cls, matrix: Linear, packed: Packed, *, is_gated: bool = False) -> _Projection:
        bias = None if matrix.bias is None else matrix.bias.float()
        if is_gated and not issubclass(packed, PackedWeight):
            return cls(packed(matrix.weight, is_gated=True), bias)
        return cls(packed(matrix.weight), bias)

    @property
    def nbytes(self) -> int:
        return sum(map(_bytes_of, self))

    def of(self, x: torch.Tensor, y: torch.Tensor) -> Operation:
        return self.weight.times(x, y, bias=self.bias)

    def added(self, x: torch.Tensor, y: torch.Tensor, planes: torch.Tensor) -> list[Operation]:
        """Make y += x W^T + b; `planes` is room for x as int8 weights take it."""
        if isinstance(self.weight, Int8Weight):
            times = self.weight.times(planes, y, bias=self.bias, is_added=True)
            return [to_planes(x, planes), times]
        return [self.weight.times(x, y, bias=self.bias, is_added=True)]

    def gated(self, x: torch.Tensor, wide: torch.Tensor, y: torch.Tensor) -> list[Operation]:
        """Make y = silu(gate) * up; `wide` is room for both."""
        if isinstance(self.weight, PackedWeight):
            return [self.of(x, wide), silu_gate(wide, y)]
        return [self.weight.times_gated(x, y, bias=self.bias)]


class _PackedLayer(NamedTuple):
    attention_norm: torch.Tensor
    qkv: _Projection
    qk_norm: torch.Tensor | None
    o: _Projection
    mlp_norm: torch.Tensor
    gate_up: _Projection
    down: _Projection

    @classmethod
    def of(cls, layer: Layer, packed: Packed) -> _PackedLayer:
        return cls(
            attention_norm=layer.attention_norm.float(),
            qkv=_Projection.packed(layer.qkv, packed),
            qk_norm=None if layer.qk_norm is None else layer.qk_norm.float(),
            o=_Projection.packed(layer.o, packed),
            mlp_norm=layer.mlp_norm.float(),
            gate_up=_Projection.packed(layer.gate_up, packed, is_gated=True),
            down=_Projection.packed(layer.down, packed),
        )


class _Buffers:
    """Where a step's numbers lie, for up to `num_tokens` tokens."""

    def __init__(
        self, config: ModelConfig, num_tokens: int, packed: Packed, dtype: torch.dtype
    ) -> None:
        num_heads, head_dim = config.num_heads, config.head_dim
        width, inner = num_heads * head_dim, config.intermediate_size
        self.num_tokens = num_tokens
        self.hidden = torch.empty(num_tokens, config.hidden_size)
        self.normed = packed.inputs(num_tokens, config.hidden_size)
        self.heads = torch.empty(num_tokens, num_heads + 2 * config.num_kv_heads, head_dim)
        self.gate_up = torch.empty(num_tokens, 2 * inner if packed is PackedWeight else 0)
        if packed is Int8Weight:
            kept = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
            self.attended = torch.empty(num_tokens, width, dtype=kept)
            self.gated = torch.empty(num_tokens, inner)
            self.planes = packed.inputs(num_tokens, max(width, inner))
        else:
            self.attended = packed.inputs(num_tokens, width)
            self.gated = packed.inputs(num_tokens, inner)
            self.planes = torch.empty(num_tokens, 0)


def _bytes_of(part: Any) -> int:
    return 0 if part is None else int(part.nbytes)
