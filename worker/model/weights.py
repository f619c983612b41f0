"""The tensors of a model, which the loader fills and the forward pass reads.

Projections of the same input are stored as one matrix (query, key and value; gate and up).  `named`
methods map names in a Hugging Face checkpoint to views that the loader fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch.nn.functional import linear

import kernels
from kernels import Activation
from worker.model.config import LayerConfig, ModelConfig
from worker.model.families import DeltaHeads, Experts
from worker.model.rope import Rope
from worker.model.shard import WHOLE, Shard

Tensors = dict[str, torch.Tensor]


class Linear:
    """y = x W^T + b, where W may stack several projections of the checkpoint along its rows.

    Attributes:
        parts: The number of rows of each projection, by its name in the checkpoint.
        weight: [rows, in_features], or [E, rows, in_features] for E experts.
        bias: [rows], [E, rows] or None.
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
        num_rows = sum(parts.values())
        shape = (num_rows,) if num_experts is None else (num_experts, num_rows)
        self.parts = parts
        self.weight = torch.empty(*shape, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(shape, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def named(self, prefix: str) -> Tensors:
        if self.weight.ndim == 2:
            return self._named(prefix, self.weight, self.bias)
        tensors: Tensors = {}
        for index, weight in enumerate(self.weight):
            bias = None if self.bias is None else self.bias[index]
            tensors |= self._named(f"{prefix}{index}.", weight, bias)
        return tensors

    def named_as_one(self, name: str) -> Tensors:
        """Return the two tensors of a checkpoint that stacks experts, with transposed matrices."""
        assert self.bias is not None
        return {name: self.weight.transpose(1, 2), f"{name}_bias": self.bias}

    def _named(self, prefix: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Tensors:
        tensors: Tensors = {}
        start = 0
        for part, rows in self.parts.items():
            tensors[f"{prefix}{part}.weight"] = weight[start : start + rows]
            if bias is not None:
                tensors[f"{prefix}{part}.bias"] = bias[start : start + rows]
            start += rows
        return tensors


def widen(part: object) -> None:
    """Convert every matrix and bias of a layer, or of one of its components, to float32."""
    if isinstance(part, Linear):
        part.weight = part.weight.float()
        part.bias = None if part.bias is None else part.bias.float()
    elif is_dataclass(part):
        for its in fields(part):
            widen(getattr(part, its.name))


@dataclass(slots=True)
class GatedMLP:
    """y = down(activation(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(kernels.gate(self.gate_up(x), self.activation))

    def named(self, prefix: str) -> Tensors:
        return self.gate_up.named(prefix) | self.down.named(prefix)


@dataclass(slots=True)
class SharedMLP:
    """The shared expert of every token: y = sigmoid(gate(x)) * mlp(x)."""

    mlp: GatedMLP
    gate: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).sigmoid() * self.mlp(x)

    def named(self, prefix: str) -> Tensors:
        return self.mlp.named(prefix + "shared_expert.") | self.gate.named(prefix)


@dataclass(slots=True)
class ExpertMLP:
    """y = the sum of share * expert(x) over a token's experts, plus shared(x) if there is one."""

    config: Experts
    router: Linear
    gate_up: Linear
    down: Linear
    activation: Activation
    shared: SharedMLP | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        top_k, is_normalized = self.config.top_k, self.config.is_normalized
        experts, shares = kernels.route(self.router(x), top_k, is_normalized=is_normalized)
        gate_up, down = self.gate_up, self.down
        biases = None if gate_up.bias is None or down.bias is None else (gate_up.bias, down.bias)
        matrices = gate_up.weight, down.weight
        y = kernels.expert_mlp(x, experts, shares, *matrices, self.activation, biases)
        return y if self.shared is None else y + self.shared(x)

    def named(self, prefix: str) -> Tensors:
        experts, router = prefix + "experts.", self.router.named(prefix)
        if self.shared is not None:
            router |= self.shared.named(prefix)
        if self.config.is_stacked:
            gate_up = self.gate_up.named_as_one(experts + "gate_up_proj")
            return router | gate_up | self.down.named_as_one(experts + "down_proj")
        return router | self.gate_up.named(experts) | self.down.named(experts)

    def finish_loading(self) -> None:
        """Move the rows of gate before those of up if the checkpoint interleaves them."""
        if self.config.is_stacked:
            for tensor in (self.gate_up.weight, self.gate_up.bias):
                for rows in () if tensor is None else tensor:
                    rows.copy_(torch.cat((rows[::2], rows[1::2])))


@dataclass(slots=True)
class Attention:
    """The tensors of softmax attention, with Hq query heads and Hkv KV heads of size D.

    Attributes:
        num_heads: Hq.
        qkv: The projections of query, key, value and, if there is an output gate, of the gate.
        qk_norm: [Hq + Hkv, D] norm weights of each query and key head, or None.
        sinks: [Hq] float32 scores of attention sinks, or None.
    """

    num_heads: int
    qkv: Linear
    qk_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    o: Linear

    def named(self, prefix: str) -> Tensors:
        return self.qkv.named(prefix + "self_attn.") | self.o.named(prefix + "self_attn.")

    def named_others(self, prefix: str) -> Tensors:
        prefix, tensors = prefix + "self_attn.", Tensors()
        if self.sinks is not None:
            tensors[prefix + "sinks"] = self.sinks
        if self.qk_norm is not None:
            # All heads share a norm: the loader fills the first row, `finish_loading` the others.
            tensors[prefix + "q_norm.weight"] = self.qk_norm[0]
            tensors[prefix + "k_norm.weight"] = self.qk_norm[self.num_heads]
        return tensors

    def finish_loading(self, config: ModelConfig, rope: Rope) -> None:
        """Copy the norm to each head, and reorder rows as the forward pass needs them."""
        num_heads = self.num_heads
        if self.qk_norm is not None:
            self.qk_norm += config.norm_shift
            self.qk_norm[:num_heads] = self.qk_norm[0].clone()
            self.qk_norm[num_heads:] = self.qk_norm[num_heads].clone()
        for tensor in (self.qkv.weight, self.qkv.bias):
            if tensor is not None and config.has_output_gate:
                _gates_last(torch.unflatten(tensor, 0, (-1, config.head_dim)), num_heads)
        if rope.num_still:
            num_rotated = num_heads + config.num_kv_heads
            for tensor in (self.qkv.weight, self.qkv.bias):
                if tensor is not None:
                    heads = torch.unflatten(tensor, 0, (-1, config.head_dim))[:num_rotated]
                    heads.copy_(heads[:, rope.order])
            if self.qk_norm is not None:
                self.qk_norm.copy_(self.qk_norm[:, rope.order])


def _gates_last(heads: torch.Tensor, num_heads: int) -> None:
    """Move the gate rows, each of which follows its head's query rows, to the end."""
    queries, gates, rest = heads[: 2 * num_heads : 2], heads[1 : 2 * num_heads : 2], 2 * num_heads
    heads.copy_(torch.cat((queries, heads[rest:], gates)))


@dataclass(slots=True)
class DeltaNet:
    """The tensors of a gated delta net with H key heads, each with R value heads of size V.

    Attributes:
        inputs: The projections to query, key, values and gates of each head, then beta and decay.
        convolution: [H, C, W] float32, over W tokens, of C channels (query, key and values).
        decay: [H, R] float32 factor of a token's decay.
        decay_bias: [H, R] float32, added to the decay that is projected from a token.
        norm: [V] float32, for the output of each value head.
    """

    config: DeltaHeads
    inputs: Linear
    convolution: torch.Tensor
    decay: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    out: Linear

    def named(self, prefix: str) -> Tensors:
        prefix += "linear_attn."
        return self.inputs.named(prefix) | self.out.named(prefix)

    def named_others(self, prefix: str) -> Tensors:
        prefix += "linear_attn."
        return {
            prefix + "conv1d.weight": self.convolution,
            prefix + "A_log": self.decay.view(-1),
            prefix + "dt_bias": self.decay_bias.view(-1),
            prefix + "norm.weight": self.norm,
        }

    def finish_loading(self) -> None:
        """Group channels by head, where a checkpoint has all queries first; negate exp(decay)."""
        heads = self.config
        dims = (heads.key_dim, heads.key_dim, heads.values_per_key * heads.value_dim)
        parts = torch.split(self.convolution[:, 0], [heads.num_heads * dim for dim in dims])
        rows = [torch.unflatten(part, 0, (heads.num_heads, -1)) for part in parts]
        self.convolution = torch.cat(rows, dim=1)
        self.decay = -self.decay.exp()


@dataclass(slots=True)
class Layer:
    """The tensors of one decoder layer.

    Attributes:
        attention_norm, mlp_norm: The norms of the inputs of attention (or delta net) and MLP.
        attention_post_norm, mlp_post_norm: The norms of their outputs, or None.
    """

    config: LayerConfig
    attention_norm: torch.Tensor
    attention: Attention | DeltaNet
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: GatedMLP | ExpertMLP
    mlp_post_norm: torch.Tensor | None

    def norms(self) -> Tensors:
        norms = {"input_layernorm.weight": self.attention_norm}
        if self.attention_post_norm is None or self.mlp_post_norm is None:
            return norms | {"post_attention_layernorm.weight": self.mlp_norm}
        return norms | {
            "post_attention_layernorm.weight": self.attention_post_norm,
            "pre_feedforward_layernorm.weight": self.mlp_norm,
            "post_feedforward_layernorm.weight": self.mlp_post_norm,
        }


class Weights:
    """The tensors of a decoder-only transformer, or of a shard of one.

    Only the first pipeline stage has an embedding, and only the last one an output head.

    Attributes:
        config: The configuration of this shard.
        weight_dtype: The dtype of embeddings and projections; all other tensors are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.config = shard.of(config)
        self._first_layer = shard.layers(config.num_layers).start
        self.kv_dtype = kv_dtype or dtype
        self.weight_dtype = dtype
        self.device = device
        rows = shard.num_rows(config.vocab_size)
        self.embed = self._empty(rows if shard.is_first else 0, config.hidden_size)
        self.layers = [self._layer(it) for it in self.config.layers]
        self.norm = self._norm(config.hidden_size)
        if config.tied_embeddings and shard.stages == 1:
            self.head = self.embed
        else:
            self.head = self._empty(rows if shard.is_last else 0, config.hidden_size)
        self.parameter_bytes = sum(tensor.nbytes for tensor in self.named_tensors().values())

    def named_tensors(self) -> Tensors:
        tensors: Tensors = {}
        # A tied head needs its own copy if the embedding is in another process.
        is_tied = self.config.tied_embeddings
        if len(self.embed) or (is_tied and len(self.head)):
            tensors["model.embed_tokens.weight"] = self.embed if len(self.embed) else self.head
        for index, layer in enumerate(self.layers, self._first_layer):
            prefix = f"model.layers.{index}."
            tensors |= {prefix + name: norm for name, norm in layer.norms().items()}
            # Keep this order: randomly initialized checkpoints are generated in it.
            tensors |= layer.attention.named(prefix) | layer.mlp.named(prefix + "mlp.")
            tensors |= layer.attention.named_others(prefix)
        tensors["model.norm.weight"] = self.norm
        if not is_tied and len(self.head):
            tensors["lm_head.weight"] = self.head
        return tensors

    def finish_loading(self) -> None:
        """Convert loaded tensors from the checkpoint's format to that of the forward pass."""
        shift = self.config.norm_shift
        self.norm += shift
        for layer in self.layers:
            for norm in layer.norms().values():
                norm += shift
            if isinstance(layer.mlp, ExpertMLP):
                layer.mlp.finish_loading()
            if isinstance(layer.attention, DeltaNet):
                layer.attention.finish_loading()
            else:
                layer.attention.finish_loading(self.config, layer.config.rope)

    def release_layers(self) -> Iterator[Layer]:
        """Yield the layers and remove them, so that the caller can free each layer's memory."""
        self.layers.reverse()
        while self.layers:
            yield self.layers.pop()

    def widen(self) -> None:
        """Convert every matrix to float32."""
        for layer in self.layers:
            widen(layer)
        is_tied = self.head is self.embed
        self.embed = self.embed.float()
        self.head = self.embed if is_tied else self.head.float()
        self.weight_dtype = torch.float32

    def _layer(self, own: LayerConfig) -> Layer:
        config, hidden = self.config, self.config.hidden_size
        return Layer(
            config=own,
            attention_norm=self._norm(hidden),
            attention=self._attention() if own.delta is None else self._delta_net(own.delta),
            attention_post_norm=self._norm(hidden) if config.post_norms else None,
            mlp_norm=self._norm(hidden),
            mlp=self._mlp() if own.experts is None else self._experts(own.experts),
            mlp_post_norm=self._norm(hidden) if config.post_norms else None,
        )

    def _attention(self) -> Attention:
        config, hidden = self.config, self.config.hidden_size
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        query_rows = 2 * query if config.has_output_gate else query
        num_rotated = config.num_heads + config.num_kv_heads
        return Attention(
            num_heads=config.num_heads,
            qkv=self._linear(
                {"q_proj": query_rows, "k_proj": kv, "v_proj": kv}, hidden, config.qkv_bias
            ),
            qk_norm=self._norm(num_rotated, config.head_dim) if config.qk_norm else None,
            sinks=self._norm(config.num_heads) if config.has_sinks else None,
            o=self._linear({"o_proj": hidden}, query, config.o_bias),
        )

    def _delta_net(self, heads: DeltaHeads) -> DeltaNet:
        hidden, number, per_key = self.config.hidden_size, heads.num_heads, heads.values_per_key
        values = number * per_key * heads.value_dim
        channels = number * heads.channels
        parts = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * number * per_key}
        return DeltaNet(
            config=heads,
            inputs=self._linear(parts, hidden, bias=False),
            convolution=self._norm(channels, 1, heads.width),
            decay=self._norm(number, per_key),
            decay_bias=self._norm(number, per_key),
            norm=self._norm(heads.value_dim),
            out=self._linear({"out_proj": hidden}, values, bias=False),
        )

    def _mlp(self, inner: int | None = None) -> GatedMLP:
        inner, hidden = inner or self.config.intermediate_size, self.config.hidden_size
        bias = self.config.mlp_bias
        return GatedMLP(
            gate_up=self._linear({"gate_proj": inner, "up_proj": inner}, hidden, bias),
            down=self._linear({"down_proj": hidden}, inner, bias),
            activation=self.config.activation,
        )

    def _experts(self, experts: Experts) -> ExpertMLP:
        inner, hidden = experts.intermediate_size, self.config.hidden_size
        number, bias = experts.num_experts, experts.has_bias
        router, shared = "router" if experts.is_stacked else "gate", None
        if experts.shared_size:
            gate = self._linear({"shared_expert_gate": 1}, hidden, bias=False)
            shared = SharedMLP(self._mlp(experts.shared_size), gate)
        return ExpertMLP(
            config=experts,
            router=self._linear({router: number}, hidden, bias),
            gate_up=self._linear({"gate_proj": inner, "up_proj": inner}, hidden, bias, number),
            down=self._linear({"down_proj": hidden}, inner, bias, number),
            activation=self.config.activation,
            shared=shared,
        )

    def _linear(
        self, parts: dict[str, int], in_features: int, bias: bool, num_experts: int | None = None
    ) -> Linear:
        dtype, device = self.weight_dtype, self.device
        return Linear(
            parts, in_features, bias=bias, dtype=dtype, device=device, num_experts=num_experts
        )

    def _norm(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.device)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.weight_dtype, device=self.device)
