"""One step of an executor: what it draws and scores, or who keeps it from being computed."""

from __future__ import annotations

from worker.executor.batch import Batch
from worker.executor.contract import Executor, SampledToken, Scorer, SequenceFailed


def compute(executor: Executor, batch: Batch) -> list[SampledToken] | SequenceFailed:
    """Run, sample and score a batch; return the token of each sampled row, or who failed it.

    Scores are kept when all is done, and so once: a step that one sequence fails counts for none.

    Raises:
        SequenceFailed: It names no sequence of the batch: a bug of the executor.
    """
    try:
        logits = executor.forward(batch)
        tokens = executor.sample(logits, batch) if batch.samplings else []
        if batch.scorings and isinstance(executor, Scorer):
            batch.keep_scores(executor.score(logits, batch))
    except SequenceFailed as failure:
        if not 0 <= failure.index < len(batch.context_lens):
            raise
        return failure
    return tokens
