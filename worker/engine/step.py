"""The parts of a step after planning: report the plan, compute the batch, commit its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import islice

from worker.engine.batch import Chunk
from worker.engine.blocks import BlockPool
from worker.engine.outputs import Computed, Displaced, Failed, Output, Reserved, Started, Token
from worker.engine.scheduler import Plan
from worker.engine.sequence import Sequence, overdue
from worker.engine.speculation import accepted
from worker.engine.stats import Counters
from worker.executor.batch import Batch
from worker.executor.contract import Drawer, Drawn, Executor, SampledToken, Scorer, SequenceFailed


def report(plan: Plan, pool: BlockPool) -> list[Output]:
    """Return the outputs of a plan for sequences that got blocks, were displaced, or failed."""
    outputs: list[Output] = [Started(*_allocation(sequence)) for sequence in plan.started]
    outputs += [Reserved(*_allocation(sequence)) for sequence in plan.reserved]
    outputs += [Displaced(request_id) for request_id in plan.displaced]
    outputs += [Failed(s.request_id, *s.out_of_blocks(pool)) for s in plan.failed]
    outputs += [Failed(s.request_id, *overdue(s.options)) for s in plan.overdue]
    return outputs


def compute(
    executor: Executor, batch: Batch, drawer: Drawer | None = None
) -> list[SampledToken] | Drawn | SequenceFailed:
    """Run, sample and score a batch; return the token of each sampled row, or the failure.

    With a `drawer` (the executor itself), the call does not wait for the tokens.  Prompt scores are
    stored last, because a batch that fails is computed again and must not be scored twice.

    Raises:
        SequenceFailed: Its index is not in the batch, which is a bug of the executor.
    """
    try:
        logits = executor.forward(batch)
        if drawer is not None:
            return drawer.draw(logits, batch)
        tokens = executor.sample(logits, batch) if batch.samplings else []
        if batch.scorings and isinstance(executor, Scorer):
            batch.keep_scores(executor.score(logits, batch))
    except SequenceFailed as failure:
        if not 0 <= failure.index < len(batch.context_lens):
            raise
        return failure
    return tokens


def commit(
    chunks: Many[Chunk], sampled: Many[SampledToken], pool: BlockPool, counters: Counters
) -> tuple[list[Output], list[Sequence]]:
    """Append the tokens, one for each sampled row; return the outputs and the ended sequences.

    The caller must free the blocks of the ended sequences.
    """
    outputs: list[Output] = []
    ended: list[Sequence] = []
    drawn = iter(sampled)
    for chunk in chunks:
        sequence, drafts = chunk.sequence, chunk.drafts
        sequence.num_computed_tokens += chunk.num_tokens
        if sequence.transfer:
            outputs.append(Computed(sequence.request_id, sequence.num_computed_tokens))
        if sequence.num_computed_tokens == len(sequence.token_ids):
            if drafts:
                tokens = accepted(drafts, list(islice(drawn, len(drafts) + 1)))
                sequence.adapt(len(drafts), len(tokens) - 1)
                counters.drafted_tokens += len(drafts)
                counters.accepted_tokens += len(tokens) - 1
            else:
                tokens = (next(drawn),)
            num_before = len(sequence.token_ids)
            if _append(sequence, tokens, outputs):
                ended.append(sequence)
            counters.decode_tokens += len(sequence.token_ids) - num_before
            # The KV of accepted drafts exists already.
            sequence.num_computed_tokens = len(sequence.token_ids) - 1
        sequence.register(pool)
        if pool.windows is not None and chunk.num_rows > 1:
            # With one row, the next step may have started and moved the window already.
            sequence.look_ahead(0, pool)
        if drafts:
            _trim(sequence, pool)
    return outputs, ended


def _allocation(sequence: Sequence) -> tuple[int, tuple[int, ...], int]:
    return sequence.request_id, tuple(sequence.block_table), sequence.num_cached_tokens


def _append(sequence: Sequence, tokens: Many[SampledToken], outputs: list[Output]) -> bool:
    """Append tokens until one ends the sequence; return True if one does."""
    scores, sequence.drafts = sequence.take_prompt_logprobs(), ()
    request_id, token_ids = sequence.request_id, sequence.token_ids
    stop_ids, last = sequence.stop_ids, sequence.max_len - sequence.num_given_tokens - 1
    for index, it in enumerate(tokens, sequence.num_new_tokens):
        token_id, reason = it.token_id, None
        token_ids.append(token_id)
        if index >= last or token_id in stop_ids:  # rare; a call for each token would be slow
            reason = sequence.finish_reason()
        outputs.append(Token(request_id, token_id, index, it.logprobs, reason, scores))
        if reason is not None or sequence.transfer:
            return True
        scores = None
    return False


def _trim(sequence: Sequence, pool: BlockPool) -> None:
    """Free the blocks that only rejected drafts needed."""
    num_blocks = pool.blocks_for(len(sequence.token_ids))
    if len(sequence.block_table) > num_blocks:
        sequence.give_back(pool, num_blocks)
