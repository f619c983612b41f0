"""The forward pass over paged KV by torch and our kernels, on any device, of a model or a shard.

One step computes T tokens of any number of sequences; only the attention and delta rule kernels
depend on which token belongs to which sequence.  It uses no autograd and no torch modules.
"""

from __future__ import annotations

from itertools import count

import torch
from torch.nn.functional import embedding, linear, silu, softplus
from torch.nn.functional import rms_norm as torch_rms_norm

import kernels
from kernels import PagedBatch, Softmax
from kernels.delta_rule import convolve, delta_rule
from worker.compute.device import arithmetic_of
from worker.compute.pool_shape import indices_in_pool
from worker.compute.ranks import Ranks
from worker.model.config import LayerConfig
from worker.model.rope import inverse_frequencies, rotation_of
from worker.model.weights import Attention, DeltaNet, Weights


class Transformer:
    """A decoder-only transformer that computes in the dtype of its weights.

    With `ranks`, it computes one shard of the model: all processes run the same steps in the same
    order, and only the leader returns logits.

    Attributes:
        arithmetic: The name of the rounding behaviour; see `arithmetic_of`.
        parameter_bytes: The total size of the tensors as they were loaded from the checkpoint.
    """

    def __init__(self, weights: Weights, ranks: Ranks | None = None) -> None:
        self._weights, self._ranks = weights, ranks
        self.config, self.device = weights.config, weights.device
        self.kv_dtype, self.dtype = weights.kv_dtype, weights.weight_dtype
        self.arithmetic = arithmetic_of(self.device, self.dtype)
        if ranks is not None:
            self.arithmetic += ranks.shard.arithmetic
        self.parameter_bytes = weights.parameter_bytes
        # Models were trained with the scale rounded to their dtype.
        self._embedding_scale = torch.tensor(self.config.embedding_scale, dtype=self.dtype).item()
        self._ropes = list(dict.fromkeys(layer.rope for layer in self.config.layers))
        frequencies = [inverse_frequencies(rope, self.device) for rope in self._ropes]
        self._frequencies = torch.stack(frequencies)
        # The index of each layer in its KV pool or, for a delta net, in the pool of states.
        in_pool, in_states = iter(indices_in_pool(self.config.windows)), count()
        self._pool_indices = [
            next(in_pool if layer.delta is None else in_states) for layer in self.config.layers
        ]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: torch.Tensor,
        batch: PagedBatch,
        rows: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one step and append its KV to the pool.

        Args:
            token_ids, positions: [T] on the device.
            pool: [N, L, 2, Hkv, B, D] KV of the layers that see every position, in the order of
                `worker.compute.pool_shape`; the pool of other layers is in `batch.windowed`.
            rows: [R] indices of the tokens whose logits are computed; None for all tokens.
            out: [R, vocab] float32 buffer for the logits; None allocates one.

        Returns:
            [R, vocab] float32 logits, valid until the next step.
        """
        weights, eps = self._weights, self.config.norm_eps
        hidden = self._embed(token_ids)
        rotations = dict(zip(self._ropes, rotation_of(positions, self._frequencies), strict=True))
        norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.norm]
        normed = kernels.rms_norm(hidden, weights.layers[0].attention_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            pool_index = self._pool_indices[index]
            if isinstance(layer.attention, DeltaNet):
                added = self._delta_net(layer.attention, normed, pool_index, batch)
            else:
                rotation = rotations[layer.config.rope]
                added = self._attention(
                    layer.attention, layer.config, normed, rotation, pool, pool_index, batch
                )
            added = self._all_reduce(added)
            if layer.attention_post_norm is not None:
                added = kernels.rms_norm(added, layer.attention_post_norm, eps)
            normed = kernels.add_rms_norm(hidden, added, layer.mlp_norm, eps)
            added = self._all_reduce(layer.mlp(normed))
            if layer.mlp_post_norm is not None:
                added = kernels.rms_norm(added, layer.mlp_post_norm, eps)
            normed = kernels.add_rms_norm(hidden, added, next_norm, eps)
        logits = self._logits(hidden, normed if rows is None else normed[rows])
        return logits.float() if out is None else out.copy_(logits)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        ranks = self._ranks
        if ranks is None:
            return self._embeddings(token_ids)
        if not ranks.shard.is_first:
            hidden = self._empty(len(token_ids), self.config.hidden_size)
            ranks.receive(hidden)
            return hidden
        # Each shard has the embeddings of some tokens, and contributes zero for other tokens.
        rows = ranks.shard.rows(token_ids, self.config.vocab_size)
        hidden = self._embeddings(rows.clamp(min=0)).masked_fill_((rows < 0)[:, None], 0)
        return self._all_reduce(hidden)

    def _embeddings(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = embedding(rows, self._weights.embed)
        if self._embedding_scale != 1:
            hidden *= self._embedding_scale
        return hidden

    def _all_reduce(self, summand: torch.Tensor) -> torch.Tensor:
        if self._ranks is not None:
            self._ranks.all_reduce(summand)
        return summand

    def _logits(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        ranks, weights = self._ranks, self._weights
        if ranks is None:
            return linear(normed, weights.head)
        if ranks.shard.is_last:
            return ranks.gather(linear(normed, weights.head))[:, : self.config.vocab_size]
        ranks.send(hidden)
        return self._empty(0, self.config.vocab_size)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def _attention(
        self,
        layer: Attention,
        own: LayerConfig,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        pool: torch.Tensor,
        pool_index: int,
        batch: PagedBatch,
    ) -> torch.Tensor:
        config, window = self.config, own.window
        if window is not None:
            assert batch.windowed is not None, "layers with a window need their pool"
            pool, batch = batch.windowed
        heads = layer.qkv(hidden).view(hidden.shape[0], -1, config.head_dim)
        gates_from = config.num_heads + 2 * config.num_kv_heads
        heads, gate = heads[:, :gates_from], heads[:, gates_from:]
        query = kernels.rotate_and_append(
            heads, rotation, pool, pool_index, batch, layer.qk_norm, config.norm_eps
        )
        scale = config.attention_scale * own.rope.score_factor
        softmax = Softmax(scale, window, sinks=layer.sinks)
        attended = kernels.paged_attention(query, pool, pool_index, batch, softmax)
        if config.has_output_gate:
            attended = attended * gate.sigmoid()
        return layer.o(attended.reshape(hidden.shape[0], -1))

    def _delta_net(
        self, layer: DeltaNet, hidden: torch.Tensor, pool_index: int, batch: PagedBatch
    ) -> torch.Tensor:
        """Compute a gated delta net: projections, convolution, delta rule, norm, output gate."""
        states, heads, eps = batch.states, layer.config, self.config.norm_eps
        assert states is not None, "layers with a state need the states of a step"
        number, per_key, depth = heads.num_heads, heads.values_per_key, heads.key_dim
        # Everything up to the norm is float32, whatever the model's dtype.
        rows, betas = layer.inputs(hidden).float().tensor_split((-2 * number * per_key,), dim=1)
        of_heads = torch.unflatten(rows, 1, (number, -1))
        mixed, gate = of_heads.tensor_split((heads.channels,), dim=-1)
        beta, decay = torch.unflatten(betas, 1, (number, -1)).tensor_split(2, dim=-1)
        num_seen = heads.channels * (heads.width - 1)
        # A state has the inputs that the convolution still sees, then the matrices of the rule.
        seen, matrices = states.pool[:, pool_index].tensor_split((num_seen,), dim=-1)
        seen = torch.unflatten(seen, -1, (heads.channels, -1))
        mixed = convolve(mixed, layer.convolution, seen, states)
        query, key, value = mixed.tensor_split((depth, 2 * depth), dim=-1)
        output = delta_rule(
            _unit(query) * depth**-0.5,
            _unit(key),
            torch.unflatten(value, -1, (per_key, -1)),
            layer.decay * softplus(decay + layer.decay_bias),
            beta.sigmoid(),
            torch.unflatten(matrices, -1, (per_key, depth, -1)),
            states,
        )
        normed = torch_rms_norm(output, (heads.value_dim,), layer.norm, eps)
        gated = normed * silu(torch.unflatten(gate, -1, (per_key, -1)))
        return layer.out(gated.flatten(1).to(hidden.dtype))


def _unit(heads: torch.Tensor) -> torch.Tensor:
    """Normalize each head's vector to length 1."""
    return heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
