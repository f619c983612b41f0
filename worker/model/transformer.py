"""The forward pass over paged KV by torch and the kernels, on any device.

One step of a transformer of the Llama family computes T tokens of any number of sequences side by
side; only the kernels of attention need to know which token belongs to which sequence.  No autograd
and no torch modules: tensors and functions.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear
from torch.nn.functional import rms_norm as torch_rms_norm

import kernels
from kernels import PagedBatch
from kernels.reference import rotated
from worker.model.device import arithmetic_of
from worker.model.pool_shape import places
from worker.model.rope import inverse_frequencies, rotation_of
from worker.model.weights import Layer, Weights


class Transformer:
    """Computes in the dtype of the weights it is given.

    Attributes:
        kv_dtype: What keys and values are kept in.
        dtype: What is computed in.
        arithmetic: What its numbers depend on, beside the tensors (`arithmetic_of`).
        parameter_bytes: What the tensors of the checkpoint took when they were read.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.config, self.device = weights.config, weights.device
        self.kv_dtype, self.dtype = weights.kv_dtype, weights.weight_dtype
        self.arithmetic = arithmetic_of(self.device, self.dtype)
        self.parameter_bytes = weights.parameter_bytes
        # Rounded as models were trained with it.
        self._embedding_scale = torch.tensor(self.config.embedding_scale, dtype=self.dtype).item()
        self._frequencies = {
            layer.rope: inverse_frequencies(layer.rope, self.device) for layer in self.config.layers
        }
        self._places = places(self.config.windows)

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
            pool: [N, L, 2, Hkv, B, D], the layers in the order of `worker.model.pool_shape`.
            rows: [R] tokens whose logits are wanted.

        Returns:
            [R, vocab] float32 logits, valid until the next step.
        """
        weights, eps = self._weights, self.config.norm_eps
        hidden = embedding(token_ids, weights.embed)
        if self._embedding_scale != 1:
            hidden *= self._embedding_scale
        rotations = {rope: rotation_of(positions, it) for rope, it in self._frequencies.items()}
        norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.norm]
        normed = kernels.rms_norm(hidden, weights.layers[0].attention_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            rotation = rotations[layer.config.rope]
            added = layer.o(self._attention(index, layer, normed, rotation, pool, batch))
            if layer.attention_post_norm is not None:
                added = kernels.rms_norm(added, layer.attention_post_norm, eps)
            normed = kernels.add_rms_norm(hidden, added, layer.mlp_norm, eps)
            added = layer.mlp(normed)
            if layer.mlp_post_norm is not None:
                added = kernels.rms_norm(added, layer.mlp_post_norm, eps)
            normed = kernels.add_rms_norm(hidden, added, next_norm, eps)
        return linear(normed[rows], weights.head).float()

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
        place = self._places[index]
        kernels.append_kv(pool, place, key_value, batch, rotation)
        window, scale = layer.config.window, config.attention_scale * layer.config.rope.score_factor
        attended = kernels.paged_attention(
            query, pool, place, batch, scale=scale, window=window, sinks=layer.sinks
        )
        return attended.reshape(hidden.shape[0], -1)
