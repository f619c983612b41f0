"""The forward pass of a Llama-family transformer over paged KV.

One step computes T tokens of any number of sequences side by side; only attention, a kernel, knows
which token belongs to whom.  Projections that read the same input are stored as one matrix (query,
key and value; gate and up).  No autograd, no modules: tensors and functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding, linear
from torch.nn.functional import rms_norm as torch_rms_norm

import kernels
from kernels import PagedBatch
from kernels.reference import rotated
from worker.model.config import ModelConfig
from worker.model.ops import Linear, Tensors
from worker.model.rope import inverse_frequencies, rotation_of

if TYPE_CHECKING:
    from worker.model.compiled import CompiledForward


@dataclass(slots=True)
class Layer:
    """The tensors of one decoder layer; `qk_norm` is [Hq + Hkv, D], a row for each head."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Transformer:
    """A decoder-only transformer; `named_tensors` says what a checkpoint has to fill.

    Attributes:
        kv_dtype: What keys and values are kept in.
        weight_dtype: What the matrices are kept in.
        dtype: What is computed in: the weights' type, float32 once compiled.
        parameter_bytes: What the tensors of the checkpoint take here, before they are compiled.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.kv_dtype = dtype
        self.weight_dtype = weight_dtype or dtype
        self.dtype = self.weight_dtype
        self.device = device
        self._compiled: CompiledForward | None = None
        self.embed = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._layer() for _ in range(config.num_layers)]
        self.norm = self._empty(config.hidden_size)
        self.head = self.embed if config.tied_embeddings else torch.empty_like(self.embed)
        self._frequencies = inverse_frequencies(config.rope, device)
        self._scale = config.head_dim**-0.5
        self.parameter_bytes = sum(tensor.nbytes for tensor in self.named_tensors().values())

    def named_tensors(self) -> Tensors:
        """Return each tensor's name in a Hugging Face checkpoint and the memory it belongs in."""
        tensors = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        if not self.config.tied_embeddings:
            tensors["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            tensors[prefix + "input_layernorm.weight"] = layer.attention_norm
            tensors[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
            tensors |= layer.qkv.named(prefix + "self_attn.") | layer.o.named(prefix + "self_attn.")
            tensors |= layer.gate_up.named(prefix + "mlp.") | layer.down.named(prefix + "mlp.")
            if layer.qk_norm is not None:
                # Heads share one norm; the loader fills the first row, `finish_loading` the others.
                tensors[prefix + "self_attn.q_norm.weight"] = layer.qk_norm[0]
                tensors[prefix + "self_attn.k_norm.weight"] = layer.qk_norm[self.config.num_heads]
        return tensors

    def finish_loading(self) -> None:
        """Complete what checkpoints hold once and the forward pass wants otherwise."""
        for layer in self.layers:
            if layer.qk_norm is not None:
                num_heads = self.config.num_heads
                layer.qk_norm[:num_heads] = layer.qk_norm[0].clone()
                layer.qk_norm[num_heads:] = layer.qk_norm[num_heads].clone()

    def compile(self) -> None:
        """Compute in float32 on the CPU: with compiled loops, or torch where a width has none."""
        from worker.model.compiled import CompiledForward

        self.dtype = torch.float32
        if CompiledForward.fits(self.config, self.weight_dtype, self.kv_dtype):
            self._compiled = CompiledForward(self)
        else:
            self._widen()

    def _widen(self) -> None:
        for layer in self.layers:
            for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
                matrix.weight = matrix.weight.float()
                matrix.bias = None if matrix.bias is None else matrix.bias.float()
            layer.attention_norm = layer.attention_norm.float()
            layer.mlp_norm = layer.mlp_norm.float()
            layer.qk_norm = None if layer.qk_norm is None else layer.qk_norm.float()
        is_tied = self.head is self.embed
        self.norm, self.embed = self.norm.float(), self.embed.float()
        self.head = self.embed if is_tied else self.head.float()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: torch.Tensor,
        batch: PagedBatch,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step and write its KV into the pool.

        Args:
            token_ids: [T] on the device; `positions` likewise.
            pool: [N, L, 2, Hkv, B, D].
            rows: [R] tokens whose logits are wanted.

        Returns:
            [R, vocab] float32 logits, valid until the next step.
        """
        if self._compiled is not None:
            return self._compiled(token_ids, positions, pool, batch, rows)
        eps = self.config.norm_eps
        hidden = embedding(token_ids, self.embed)
        rotation = rotation_of(positions, self._frequencies)
        norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        normed = kernels.rms_norm(hidden, self.layers[0].attention_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(self.layers, norms, strict=True)):
            attended = layer.o(self._attention(index, layer, normed, rotation, pool, batch))
            normed = kernels.add_rms_norm(hidden, attended, layer.mlp_norm, eps)
            added = layer.down(kernels.silu_gate(layer.gate_up(normed)))
            normed = kernels.add_rms_norm(hidden, added, next_norm, eps)
        return linear(normed[rows], self.head).float()

    def _attention(
        self,
        index: int,
        layer: Layer,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        pool: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = layer.qkv(hidden).view(hidden.shape[0], -1, config.head_dim)
        query_key = heads[:, :num_rotated]
        if layer.qk_norm is not None:
            query_key.copy_(
                torch_rms_norm(query_key, (config.head_dim,), None, config.norm_eps) * layer.qk_norm
            )
        query = rotated(heads[:, : config.num_heads], rotation)
        key_value = heads[:, config.num_heads :]
        # Keys lie before values in a row of the projection, as the pool has them.
        key_value = key_value.view(len(heads), 2, config.num_kv_heads, config.head_dim)
        kernels.append_kv(pool, index, key_value, batch, rotation)
        attended = kernels.paged_attention(
            query, pool, index, batch, scale=self._scale, window=config.windows[index]
        )
        return attended.reshape(hidden.shape[0], -1)

    def _layer(self) -> Layer:
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner, hidden = config.intermediate_size, config.hidden_size
        num_rotated = config.num_heads + config.num_kv_heads
        return Layer(
            attention_norm=self._empty(hidden),
            qkv=self._linear(
                {"q_proj": query, "k_proj": kv, "v_proj": kv}, hidden, config.qkv_bias
            ),
            qk_norm=self._empty(num_rotated, config.head_dim) if config.qk_norm else None,
            o=self._linear({"o_proj": hidden}, query, config.o_bias),
            mlp_norm=self._empty(hidden),
            gate_up=self._linear({"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias),
            down=self._linear({"down_proj": hidden}, inner, config.mlp_bias),
        )

    def _linear(self, parts: dict[str, int], in_features: int, bias: bool) -> Linear:
        return Linear(parts, in_features, bias=bias, dtype=self.weight_dtype, device=self.device)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.weight_dtype, device=self.device)
