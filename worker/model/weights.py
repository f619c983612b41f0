"""The tensors of a model: what a checkpoint fills and a forward pass reads.

Projections that read the same input are stored as one matrix (query, key and value; gate and up).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

import kernels
from kernels import Activation
from worker.model.config import LayerConfig, ModelConfig
from worker.model.families import Experts

Tensors = dict[str, torch.Tensor]


class Linear:
    """y = x W^T + b, whose rows may be several projections of the checkpoint, one after another.

    Attributes:
        weight: [rows, in_features]; of `num_experts` each has its own: [E, rows, in_features].
        bias: [rows] or [E, rows]; None for none.
    """

    __slots__ = ("bias", "parts", "weight")

    def __init__(
        self,
        parts: dict[str, int],
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        num_experts: int | None = None,
    ) -> None:
        shape = (
            (sum(parts.values()),) if num_experts is None else (num_experts, sum(parts.values()))
        )
        self.parts = parts
        self.weight = torch.empty(*shape, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(shape, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, rows] for [T, in_features]."""
        return linear(x, self.weight, self.bias)

    def named(self, prefix: str) -> Tensors:
        """Return the checkpoint's names and the rows each fills."""
        if self.weight.ndim == 2:
            return self._named(prefix, self.weight, self.bias)
        tensors: Tensors = {}
        for index, weight in enumerate(self.weight):
            bias = None if self.bias is None else self.bias[index]
            tensors |= self._named(f"{prefix}{index}.", weight, bias)
        return tensors

    def named_as_one(self, name: str) -> Tensors:
        """Return what a checkpoint calls the matrices and biases of all experts, turned over."""
        assert self.bias is not None
        return {name: self.weight.transpose(1, 2), f"{name}_bias": self.bias}

    def widen(self) -> None:
        """Make the tensors float32."""
        self.weight = self.weight.float()
        self.bias = None if self.bias is None else self.bias.float()

    def _named(self, prefix: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Tensors:
        tensors: Tensors = {}
        start = 0
        for part, rows in self.parts.items():
            tensors[f"{prefix}{part}.weight"] = weight[start : start + rows]
            if bias is not None:
                tensors[f"{prefix}{part}.bias"] = bias[start : start + rows]
            start += rows
        return tensors


@dataclass(slots=True)
class GatedMLP:
    """y = down(activation(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden] for [T, hidden]."""
        return self.down(kernels.gate(self.gate_up(x), self.activation))

    def named(self, prefix: str) -> Tensors:
        """Return the checkpoint's names and the rows each fills."""
        return self.gate_up.named(prefix) | self.down.named(prefix)

    def widen(self) -> None:
        """Make the tensors float32."""
        self.gate_up.widen()
        self.down.widen()


@dataclass(slots=True)
class ExpertMLP:
    """y = the sum of share * expert(x) over a token's experts; each expert is a gated MLP."""

    config: Experts
    router: Linear
    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden] for [T, hidden]."""
        top_k, is_normalized = self.config.top_k, self.config.is_normalized
        experts, shares = kernels.route(self.router(x), top_k, is_normalized=is_normalized)
        gate_up, down = self.gate_up, self.down
        biases = None if gate_up.bias is None or down.bias is None else (gate_up.bias, down.bias)
        matrices = gate_up.weight, down.weight
        return kernels.expert_mlp(x, experts, shares, *matrices, self.activation, biases)

    def named(self, prefix: str) -> Tensors:
        """Return the checkpoint's names and the rows each fills."""
        experts, router = prefix + "experts.", self.router.named(prefix)
        if self.config.is_stacked:
            gate_up = self.gate_up.named_as_one(experts + "gate_up_proj")
            return router | gate_up | self.down.named_as_one(experts + "down_proj")
        return router | self.gate_up.named(experts) | self.down.named(experts)

    def finish_loading(self) -> None:
        """Put the rows of gates before those of up, where they alternate."""
        if self.config.is_stacked:
            for tensor in (self.gate_up.weight, self.gate_up.bias):
                for rows in () if tensor is None else tensor:
                    rows.copy_(torch.cat((rows[::2], rows[1::2])))

    def widen(self) -> None:
        """Make the tensors float32."""
        for matrices in (self.router, self.gate_up, self.down):
            matrices.widen()


@dataclass(slots=True)
class Layer:
    """The tensors of one decoder layer.

    Attributes:
        attention_norm: Of what attention reads; `mlp_norm` likewise.
        qk_norm: [Hq + Hkv, D], a row for each head; None for none.
        sinks: [Hq] float32; None for none.
        attention_post_norm: Of what attention adds; None for none; `mlp_post_norm` likewise.
    """

    config: LayerConfig
    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    o: Linear
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: GatedMLP | ExpertMLP
    mlp_post_norm: torch.Tensor | None

    def norms(self) -> Tensors:
        """Return the checkpoint's names of the norms of whole rows, and the memory of each."""
        norms = {"input_layernorm.weight": self.attention_norm}
        if self.attention_post_norm is None or self.mlp_post_norm is None:
            return norms | {"post_attention_layernorm.weight": self.mlp_norm}
        return norms | {
            "post_attention_layernorm.weight": self.attention_post_norm,
            "pre_feedforward_layernorm.weight": self.mlp_norm,
            "post_feedforward_layernorm.weight": self.mlp_post_norm,
        }


class Weights:
    """A decoder-only transformer's tensors; `named_tensors` says what a checkpoint has to fill.

    Attributes:
        kv_dtype: What keys and values are to be kept in.
        weight_dtype: What the matrices are kept in; norms and sinks are float32.
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
        self.layers = [self._layer(it) for it in config.layers]
        self.norm = self._norm(config.hidden_size)
        self.head = self.embed if config.tied_embeddings else torch.empty_like(self.embed)
        self.parameter_bytes = sum(tensor.nbytes for tensor in self.named_tensors().values())

    def named_tensors(self) -> Tensors:
        """Return each tensor's name in a Hugging Face checkpoint and the memory it belongs in."""
        tensors = {"model.embed_tokens.weight": self.embed}
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            tensors |= {prefix + name: norm for name, norm in layer.norms().items()}
            tensors |= layer.qkv.named(prefix + "self_attn.") | layer.o.named(prefix + "self_attn.")
            tensors |= layer.mlp.named(prefix + "mlp.")
            if layer.sinks is not None:
                tensors[prefix + "self_attn.sinks"] = layer.sinks
            if layer.qk_norm is not None:
                # Heads share one norm; the loader fills the first row, `finish_loading` the others.
                tensors[prefix + "self_attn.q_norm.weight"] = layer.qk_norm[0]
                tensors[prefix + "self_attn.k_norm.weight"] = layer.qk_norm[self.config.num_heads]
        tensors["model.norm.weight"] = self.norm
        if not self.config.tied_embeddings:
            tensors["lm_head.weight"] = self.head
        return tensors

    def finish_loading(self) -> None:
        """Complete what checkpoints hold once and the forward pass wants otherwise."""
        num_heads, shift = self.config.num_heads, self.config.norm_shift
        self.norm += shift
        for layer in self.layers:
            for norm in layer.norms().values():
                norm += shift
            if isinstance(layer.mlp, ExpertMLP):
                layer.mlp.finish_loading()
            if layer.qk_norm is not None:
                layer.qk_norm += shift
                layer.qk_norm[:num_heads] = layer.qk_norm[0].clone()
                layer.qk_norm[num_heads:] = layer.qk_norm[num_heads].clone()

    def release_layers(self) -> Iterator[Layer]:
        """Give the layers away one by one, from the first: whoever drops one frees its memory."""
        self.layers.reverse()
        while self.layers:
            yield self.layers.pop()

    def widen(self) -> None:
        """Make every matrix float32, as norms and sinks are."""
        for layer in self.layers:
            for matrices in (layer.qkv, layer.o, layer.mlp):
                matrices.widen()
        is_tied = self.head is self.embed
        self.embed = self.embed.float()
        self.head = self.embed if is_tied else self.head.float()
        self.weight_dtype = torch.float32

    def _layer(self, own: LayerConfig) -> Layer:
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden = config.hidden_size
        num_rotated = config.num_heads + config.num_kv_heads
        return Layer(
            config=own,
            attention_norm=self._norm(hidden),
            qkv=self._linear(
                {"q_proj": query, "k_proj": kv, "v_proj": kv}, hidden, config.qkv_bias
            ),
            qk_norm=self._norm(num_rotated, config.head_dim) if config.qk_norm else None,
            sinks=self._norm(config.num_heads) if config.has_sinks else None,
            o=self._linear({"o_proj": hidden}, query, config.o_bias),
            attention_post_norm=self._norm(hidden) if config.post_norms else None,
            mlp_norm=self._norm(hidden),
            mlp=self._mlp() if own.experts is None else self._experts(own.experts),
            mlp_post_norm=self._norm(hidden) if config.post_norms else None,
        )

    def _mlp(self) -> GatedMLP:
        inner, hidden = self.config.intermediate_size, self.config.hidden_size
        bias = self.config.mlp_bias
        return GatedMLP(
            gate_up=self._linear({"gate_proj": inner, "up_proj": inner}, hidden, bias),
            down=self._linear({"down_proj": hidden}, inner, bias),
            activation=self.config.activation,
        )

    def _experts(self, experts: Experts) -> ExpertMLP:
        inner, hidden = experts.intermediate_size, self.config.hidden_size
        number, bias = experts.num_experts, experts.has_bias
        router = "router" if experts.is_stacked else "gate"
        return ExpertMLP(
            config=experts,
            router=self._linear({router: number}, hidden, bias),
            gate_up=self._linear({"gate_proj": inner, "up_proj": inner}, hidden, bias, number),
            down=self._linear({"down_proj": hidden}, inner, bias, number),
            activation=self.config.activation,
        )

    def _linear(
        self, parts: dict[str, int], in_features: int, bias: bool, num_experts: int | None = None
    ) -> Linear:
        return Linear(
            parts,
            in_features,
            bias=bias,
            dtype=self.weight_dtype,
            device=self.device,
            num_experts=num_experts,
        )

    def _norm(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.device)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.weight_dtype, device=self.device)
