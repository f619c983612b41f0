"""A step in flight: the device computes it while the host commits the previous step.

The host plans and starts step n + 1 as if each sequence of step n continued, then reads the tokens
of step n.  If a sequence turns out to have ended, its token of step n + 1 is discarded.  Its blocks
may be reused at once, because the device runs steps and copies in the order of their start.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from worker.engine.batch import Chunk
from worker.engine.sequence import Status
from worker.executor.batch import Sampling
from worker.executor.contract import Drawn, SampledToken


class Flight:
    """A step whose tokens are not read yet; its sequences are advanced as if it were complete.

    Until `land`, a sequence ends in the placeholder -1 - r for the token sampled in row r.
    """

    def __init__(self, chunks: Many[Chunk], samplings: Many[Sampling], drawn: Drawn) -> None:
        rows = {sampling.request_id: row for row, sampling in enumerate(samplings)}
        self._parts = [(chunk, rows.get(chunk.sequence.request_id)) for chunk in chunks]
        self._drawn = drawn
        for chunk, row in self._parts:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.num_tokens
            if row is not None:
                sequence.token_ids.append(~row)
                # At the length limit no further step is needed.
                sequence.is_ready = len(sequence.token_ids) < sequence.max_len

    def land(self) -> tuple[list[Chunk], list[SampledToken]]:
        """Wait for the step, undo the advance of its sequences; return chunks and tokens to commit.

        Sequences that have ended in the meantime are left out.
        """
        drawn = self._drawn()
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
