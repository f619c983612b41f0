"""A step in flight: a device computes it while the host commits the one before and plans the next.

After step n has begun, the host plans step n + 1 as if each sequence of n went on, starts it, too,
and only then reads the tokens of n.  A sequence that turns out to have ended has a row in
n + 1 for nothing: its token is dropped, and its KV lies behind all that is read.  Its blocks are
free for others at once, who write to them later: a device computes steps in order, and a copy
begins after the steps that were started before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from worker.engine.batch import Chunk
from worker.engine.sequence import Status
from worker.executor.batch import Sampling
from worker.executor.contract import Drawn, SampledToken


class Flight:
    """A step whose tokens were not read yet; its sequences have moved on as if it had ended.

    Until `land`, -1 - r stands for the token of row r at the end of a sequence.
    """

    def __init__(self, chunks: Many[Chunk], samplings: Many[Sampling], drawn: Drawn) -> None:
        """Let the sequences of a step move on."""
        rows = {sampling.request_id: row for row, sampling in enumerate(samplings)}
        self._parts = [(chunk, rows.get(chunk.sequence.request_id)) for chunk in chunks]
        self._drawn = drawn
        for chunk, row in self._parts:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.num_tokens
            if row is not None:
                sequence.token_ids.append(~row)
                # Nothing follows a token that is known to be the last.
                sequence.is_ready = len(sequence.token_ids) < sequence.max_len

    def land(self) -> tuple[list[Chunk], list[SampledToken]]:
        """Wait for the step; return its chunks and the tokens drawn, to be committed.

        Sequences are as they were before the step.  Those that have ended since are left out.
        """
        drawn = self._drawn.tokens()
        chunks: list[Chunk] = []
        tokens: list[SampledToken] = []
        for chunk, row in self._parts:
            sequence = chunk.sequence
            if sequence.status is not Status.RUNNING:
                continue
            chunks.append(chunk)
            sequence.num_computed_tokens -= chunk.num_tokens
            if row is not None:
                tokens.append(drawn[row])
                sequence.token_ids.pop()
        return chunks, tokens
