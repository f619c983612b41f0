"""Drafts for speculative decoding from a draft model: any executor, with its own paged KV cache.

Each sequence has a shadow: a sequence with the same tokens, but with blocks of the draft model's
cache.  One call of `draft` computes the new tokens, then samples one draft after another for all
sequences.  A shadow samples with the seed, penalties and structure of its sequence, so where the
two models agree, they sample the same token.

One call computes at most one batch per draft, of up to `max_ubatch_tokens`, so a long prompt is
prefilled over several calls.  A sequence gets no drafts until its shadow has caught up, while the
cache has too few free blocks, or after the draft model has failed on it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import msgspec
import structlog

from worker.engine.batch import Chunk, build
from worker.engine.blocks import BlockPool
from worker.engine.sequence import Sequence
from worker.engine.speculation import checked
from worker.executor.batch import BatchType
from worker.executor.contract import Executor, SampledToken, SequenceFailed

log = structlog.get_logger("worker")


class ModelDrafter:
    """Drafts up to `num_drafts` tokens; implements `worker.engine.speculation.Drafter`."""

    def __init__(
        self,
        executor: Executor,
        num_drafts: int,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_ubatch_tokens: int = 512,
    ) -> None:
        self.num_drafts = checked(num_drafts)
        self.vocab_size: int | None = executor.info.vocab_size
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_cache=False)
        self._executor = executor
        self._max_ubatch_tokens = max_ubatch_tokens
        self._max_model_len = executor.info.max_model_len
        self._shadows: dict[int, Sequence] = {}
        self._given_up: set[int] = set()
        executor.allocate(num_blocks, block_size)

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        drafting: list[tuple[Sequence, int]] = []
        for sequence, limit in zip(sequences, limits, strict=True):
            if sequence.request_id in self._given_up:
                continue
            limit = min(limit, self.num_drafts, self._max_model_len - sequence.num_tokens)
            shadow = self._follow(sequence)
            if limit > 0 and self._allocate_for_drafts(shadow, limit):
                drafting.append((shadow, limit))
        # Shadows with the fewest uncomputed tokens first; a long prompt gets the rest of the batch.
        drafting.sort(key=lambda it: it[0].num_uncomputed_tokens)
        while drafting:
            drawn = self._advance([shadow for shadow, _ in drafting])
            for shadow, token in drawn:
                shadow.token_ids.append(token.token_id)
                shadow.drafts += (token.token_id,)
            # A shadow that has no draft after the first batch has not caught up yet.
            drafting = [it for it in drafting if 0 < len(it[0].drafts) < it[1]]
        shadows = [self._shadows.get(sequence.request_id) for sequence in sequences]
        return [[] if shadow is None else list(shadow.drafts) for shadow in shadows]

    def forget(self, request_id: int) -> None:
        self._given_up.discard(request_id)
        self._free(request_id)

    def check(self) -> None:
        self.pool.check(shadow.block_table for shadow in self._shadows.values())

    def _give_up(self, failure: SequenceFailed, shadows: list[Sequence]) -> None:
        """Stop drafting for the sequence that failed."""
        if not 0 <= failure.index < len(shadows):
            raise failure
        request_id = shadows[failure.index].request_id
        log.warning("the draft model failed", request=request_id, exc_info=failure)
        shadows[failure.index].drafts = ()
        self._free(request_id)
        self._given_up.add(request_id)

    def _free(self, request_id: int) -> None:
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            shadow.give_back(self.pool)

    def _follow(self, sequence: Sequence) -> Sequence:
        """Return the sequence's shadow, updated to the sequence's tokens."""
        shadow = self._shadows.get(sequence.request_id)
        if shadow is None:
            shadow = self._shadows[sequence.request_id] = _shadow_of(sequence)
        # A sequence only grows, so its earlier tokens are unchanged.
        followed = shadow.num_tokens - len(shadow.drafts)
        known = followed + _num_common(shadow.drafts, sequence.token_ids[followed:])
        if shadow.occurrences is not None:
            shadow.occurrences.rewind(shadow.token_ids, known)
        if shadow.structured is not None:
            shadow.structured.rewind(known)
        shadow.token_ids[known:] = sequence.token_ids[known:]
        shadow.drafts = ()
        # The last token is always computed, because the first draft is sampled from its logits.
        known = min(known, sequence.num_tokens - 1)
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, known)
        return shadow

    def _allocate_for_drafts(self, shadow: Sequence, num_drafts: int) -> bool:
        num_tokens = shadow.num_tokens + num_drafts - 1  # the last draft needs no KV
        num_blocks = self.pool.blocks_for(num_tokens) - len(shadow.block_table)
        if num_blocks > 0:
            if not self.pool.can_allocate(num_blocks):
                return False
            shadow.take(num_blocks, self.pool)
        return True

    def _advance(self, shadows: list[Sequence]) -> list[tuple[Sequence, SampledToken]]:
        """Compute one batch; return each shadow that is then fully computed, with its next token.

        If one shadow fails, no token is sampled.
        """
        budget, chunks = self._max_ubatch_tokens, list[Chunk]()
        for shadow in shadows:
            num_tokens = min(budget, shadow.num_uncomputed_tokens)
            if num_tokens:
                chunks.append(Chunk(shadow, num_tokens))
                budget -= num_tokens
        batch = build(BatchType.MIXED, chunks, self.pool.block_size)
        try:
            logits = self._executor.forward(batch)
            tokens = self._executor.sample(logits, batch) if batch.samplings else []
        except SequenceFailed as failure:
            self._give_up(failure, [chunk.sequence for chunk in chunks])
            return []
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
        ready = [chunk.sequence for chunk in chunks if not chunk.sequence.num_uncomputed_tokens]
        return list(zip(ready, tokens, strict=True))


def _shadow_of(sequence: Sequence) -> Sequence:
    """Return a copy of a sequence that samples identically and has nothing computed."""
    options = msgspec.structs.replace(
        sequence.options,
        # Penalties and min_tokens count generated tokens.
        generated_tokens=sequence.num_output_tokens,
        logprobs=None,
        prompt_logprobs=None,
    )
    shadow = Sequence(sequence.request_id, sequence.token_ids, options)
    if sequence.structured is not None:
        shadow.structured = sequence.structured.begin(shadow.prompt_len)
    return shadow


def _num_common(left: Many[int], right: Many[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
