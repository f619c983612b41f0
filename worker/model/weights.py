"""The tensors of a model: what a checkpoint fills and a forward pass reads.

Projections that read the same input are stored as one matrix (query, key and value; gate and up).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from worker.model.config import ModelConfig

Tensors = dict[str, torch.Tensor]


class Linear:
    """y = x W^T + b, whose rows may be several projections of the checkpoint, one after another."""

    __slots__ = ("bias", "parts", "weight")

    def __init__(
        self,
        parts: dict[str, int],
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = sum(parts.values())
        self.parts = parts
        self.weight = torch.empty(rows, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, rows] for [T, in_features]."""
        return linear(x, self.weight, self.bias)

    def named(self, prefix: str) -> Tensors:
        """Return the checkpoint's names and the rows each fills."""
        tensors: Tensors = {}
        start = 0
        for part, rows in self.parts.items():
            tensors[f"{prefix}{part}.weight"] = self.weight[start : start + rows]
            if self.bias is not None:
                tensors[f"{prefix}{part}.bias"] = self.bias[start : start + rows]
            start += rows
        return tensors


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


class Weights:
    """A decoder-only transformer's tensors; `named_tensors` says what a checkpoint has to fill.

    Attributes:
        kv_dtype: What keys and values are to be kept in.
        weight_dtype: What the tensors are kept in.
        parameter_bytes: What they take.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.kv_dtype = kv_dtype or dtype
        self.weight_dtype = dtype
        self.device = device
        self.embed = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._layer() for _ in range(config.num_layers)]
        self.norm = self._empty(config.hidden_size)
        self.head = self.embed if config.tied_embeddings else torch.empty_like(self.embed)
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

    def release_layers(self) -> Iterator[Layer]:
        """Give the layers away one by one, from the first: whoever drops one frees its memory."""
        self.layers.reverse()
        while self.layers:
            yield self.layers.pop()

    def widen(self) -> None:
        """Make every tensor float32."""
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
        self.weight_dtype = torch.float32

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
