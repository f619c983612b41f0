"""The forward pass of one shard by torch; all processes run the same steps in the same order."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from worker.compute.ranks import Ranks
from worker.compute.transformer import Transformer
from worker.model.weights import Weights


class ShardedTransformer(Transformer):
    """Computes one shard of a model; only the leader returns logits."""

    def __init__(self, weights: Weights, ranks: Ranks) -> None:
        super().__init__(weights)
        self._ranks, self._shard = ranks, ranks.shard
        self.arithmetic += self._shard.arithmetic

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if not self._shard.is_first:
            hidden = self._empty(len(token_ids), self.config.hidden_size)
            self._ranks.receive(hidden)
            return hidden
        # Each shard has the embeddings of some tokens, and contributes zero for other tokens.
        rows = self._shard.rows(token_ids, self.config.vocab_size)
        hidden = super()._embed(rows.clamp(min=0))
        hidden.masked_fill_((rows < 0)[:, None], 0)
        self._ranks.all_reduce(hidden)
        return hidden

    def _all_reduce(self, summand: torch.Tensor) -> torch.Tensor:
        self._ranks.all_reduce(summand)
        return summand

    def _logits(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        if self._shard.is_last:
            logits = self._ranks.gather(linear(normed, self._weights.head))
            return logits[:, : self.config.vocab_size]
        self._ranks.send(hidden)
        return self._empty(0, self.config.vocab_size)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)
