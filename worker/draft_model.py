"""A small model that guesses for a large one; any executor, with a paged KV cache of its own.

Each sequence has a shadow here: the same tokens, other blocks.  A round computes what is new since
the last one, in chunks, then one token after the other, all sequences side by side.  What the
target did not accept is cut off the shadow before the next round.  A shadow draws with the keys of
its sequence (seed, choice, position): where the models agree, they draw the same token.

When its blocks run out a sequence gets no drafts, that is all.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from worker.batch import BatchType, Chunk, build
from worker.blocks import BlockPool
from worker.executor.contract import Executor, SampledToken
from worker.sequence import Sequence


class ModelDrafter:
    """Guesses `num_drafts` tokens with an executor; implements `worker.speculate.Drafter`."""

    def __init__(
        self,
        executor: Executor,
        num_drafts: int,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_ubatch_tokens: int = 512,
    ) -> None:
        if num_drafts < 1:
            raise ValueError(f"{num_drafts} drafts are not at least 1")
        self.num_drafts = num_drafts
        self.vocab_size: int | None = executor.info.vocab_size
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_cache=False)
        self._executor = executor
        self._max_ubatch_tokens = max_ubatch_tokens
        self._max_model_len = executor.info.max_model_len
        self._shadows: dict[int, Sequence] = {}
        executor.allocate(num_blocks, block_size)

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        """See `Drafter`."""
        drafts: list[list[int]] = [[] for _ in sequences]
        guessing: list[tuple[Sequence, list[int], int]] = []
        for sequence, limit, guesses in zip(sequences, limits, drafts, strict=True):
            limit = min(limit, self.num_drafts, self._max_model_len - sequence.num_tokens)
            shadow = self._follow(sequence)
            if limit > 0 and self._make_room(shadow, limit):
                guessing.append((shadow, guesses, limit))
        while guessing:
            drawn = self._advance([shadow for shadow, _, _ in guessing])
            for (shadow, guesses, _), token in zip(guessing, drawn, strict=True):
                shadow.token_ids.append(token.token_id)
                guesses.append(token.token_id)
            guessing = [entry for entry in guessing if len(entry[1]) < entry[2]]
        return drafts

    def forget(self, request_id: int) -> None:
        """See `Drafter`."""
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            self.pool.free(shadow.block_table)

    def check(self) -> None:
        """Assert that every block is accounted for."""
        self.pool.check(shadow.block_table for shadow in self._shadows.values())

    def _follow(self, sequence: Sequence) -> Sequence:
        """Return the shadow with the sequence's tokens; KV of others counts as not computed."""
        shadow = self._shadows.get(sequence.request_id)
        if shadow is None:
            shadow = Sequence(sequence.request_id, [], sequence.options)
            self._shadows[sequence.request_id] = shadow
        shadow.prompt_len = sequence.prompt_len
        known = _num_common(shadow.token_ids, sequence.token_ids, shadow.num_computed_tokens)
        shadow.token_ids = list(sequence.token_ids)
        # The last token is always computed: the guess is drawn from its logits.
        shadow.num_computed_tokens = min(known, sequence.num_tokens - 1)
        return shadow

    def _make_room(self, shadow: Sequence, num_drafts: int) -> bool:
        num_tokens = shadow.num_tokens + num_drafts - 1  # the last guess needs no KV
        num_blocks = self.pool.blocks_for(num_tokens) - len(shadow.block_table)
        if num_blocks > 0:
            if not self.pool.can_allocate(num_blocks):
                return False
            shadow.block_table.extend(self.pool.allocate(num_blocks))
        return True

    def _advance(self, shadows: list[Sequence]) -> list[SampledToken]:
        """Compute all tokens of the shadows, in batches of bounded size; draw the next of each."""
        drawn: dict[int, SampledToken] = {}
        waiting = shadows
        while waiting:
            budget, chunks = self._max_ubatch_tokens, list[Chunk]()
            for shadow in waiting:
                num_tokens = min(budget, shadow.num_uncomputed_tokens)
                if num_tokens:
                    chunks.append(Chunk(shadow, num_tokens))
                    budget -= num_tokens
            batch = build(BatchType.MIXED, chunks, self.pool.block_size)
            logits = self._executor.forward(batch)
            tokens = self._executor.sample(logits, batch) if batch.samplings else []
            for sampling, token in zip(batch.samplings, tokens, strict=True):
                drawn[sampling.request_id] = token
            for chunk in chunks:
                chunk.sequence.num_computed_tokens += chunk.num_tokens
            waiting = [shadow for shadow in waiting if shadow.num_uncomputed_tokens]
        return [drawn[shadow.request_id] for shadow in shadows]


def _num_common(left: list[int], right: list[int], limit: int) -> int:
    """Return how many leading tokens, of `limit` at most, the two share."""
    limit = min(limit, len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return next(index for index in range(limit) if left[index] != right[index])
