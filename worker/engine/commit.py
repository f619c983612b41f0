"""What the tokens of a step change: the texts, the prefix cache, and what is said of it.

Sequences keep their blocks here, whether they have ended or not: the engine lets go of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import islice

from worker.engine.batch import Chunk
from worker.engine.blocks import BlockPool
from worker.engine.outputs import Computed, Output, Token
from worker.engine.sequence import Sequence
from worker.engine.sharing import register
from worker.engine.speculation import accepted
from worker.engine.stats import Counters
from worker.executor.contract import SampledToken


def commit(
    chunks: Many[Chunk], sampled: Many[SampledToken], pool: BlockPool, counters: Counters
) -> tuple[list[Output], list[Sequence]]:
    """Return the outputs of a computed step, and the sequences whose last token is among them.

    Args:
        sampled: One for each sampled row, in the order of the chunks.
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
                counters.verified(len(drafts), len(tokens) - 1)
            else:
                tokens = (next(drawn),)
            num_before = len(sequence.token_ids)
            if _append(sequence, tokens, outputs):
                ended.append(sequence)
            counters.decode_tokens += len(sequence.token_ids) - num_before
            # The KV of accepted drafts is that of their tokens.
            sequence.num_computed_tokens = len(sequence.token_ids) - 1
        register(sequence, pool)
        if drafts:
            _trim(sequence, pool)
    return outputs, ended


def _append(sequence: Sequence, tokens: Many[SampledToken], outputs: list[Output]) -> bool:
    """Append tokens, up to the first that is the sequence's last; say whether one was."""
    scores, sequence.drafts = sequence.take_prompt_logprobs(), ()
    request_id, token_ids = sequence.request_id, sequence.token_ids
    stop_ids, last = sequence.stop_ids, sequence.max_len - sequence.num_given_tokens - 1
    for index, it in enumerate(tokens, sequence.num_new_tokens):
        token_id, reason = it.token_id, None
        token_ids.append(token_id)
        if index >= last or token_id in stop_ids:  # seldom; a call for each token adds up
            reason = sequence.finish_reason()
        outputs.append(Token(request_id, token_id, index, it.logprobs, reason, scores))
        if reason is not None or sequence.transfer:
            return True
        scores = None
    return False


def _trim(sequence: Sequence, pool: BlockPool) -> None:
    """Give back the blocks that only rejected drafts needed."""
    num_blocks = pool.blocks_for(len(sequence.token_ids))
    if len(sequence.block_table) > num_blocks:
        pool.free(sequence.block_table[num_blocks:])
        del sequence.block_table[num_blocks:]
