"""An executor driven by hand, without an engine: seed 003's prefill, decode and release_cache.

For the warmup, for trying a plug-in in a console and for tests of executors.  It hands out blocks
of its own, so it must not share a cache with an engine that runs.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from wire.options import Options
from worker.engine.batch import Chunk, build
from worker.engine.blocks import BlockPool
from worker.engine.sequence import Sequence, Status
from worker.executor.batch import BatchType
from worker.executor.contract import Executor, KVCache, SampledToken


class Direct:
    """Reads prompts and generates, each call one step.  `cache` is what `allocate` returned."""

    def __init__(self, executor: Executor, cache: KVCache) -> None:
        self._executor = executor
        self._pool = BlockPool(cache.num_blocks, cache.block_size, enable_prefix_cache=False)

    def prefill(self, token_ids: Many[int], options: Options | None = None) -> Sequence:
        """Read a prompt; return the sequence, its first token appended to its `token_ids`."""
        (sequence,) = self.batch_prefill([token_ids], options)
        return sequence

    def batch_prefill(
        self, prompts: Many[Many[int]], options: Options | None = None
    ) -> list[Sequence]:
        """Read several prompts in one step.

        Raises:
            ValueError: There are not enough blocks.
        """
        sequences = [Sequence(index, prompt, options) for index, prompt in enumerate(prompts)]
        self._step(BatchType.PREFILL, sequences)
        return sequences

    def decode(self, sequence: Sequence) -> SampledToken:
        """Compute the KV of the sequence's last token; draw, append and return the next one."""
        (token,) = self.batch_decode([sequence])
        return token

    def batch_decode(self, sequences: Many[Sequence]) -> list[SampledToken]:
        """Generate one token of each sequence in one step.

        Raises:
            ValueError: There are not enough blocks.
        """
        return self._step(BatchType.DECODE, sequences)

    def release_cache(self, sequence: Sequence) -> None:
        """Take the sequence's blocks back; it cannot go on."""
        self._pool.free(sequence.block_table)
        del sequence.block_table[:]
        sequence.move_to(Status.FINISHED)

    def _step(self, kind: BatchType, sequences: Many[Sequence]) -> list[SampledToken]:
        self._allocate(sequences)
        chunks = [Chunk(sequence, sequence.num_uncomputed_tokens) for sequence in sequences]
        batch = build(kind, chunks, self._pool.block_size)
        tokens = self._executor.sample(self._executor.forward(batch), batch)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.token_ids.append(token.token_id)
        return tokens

    def _allocate(self, sequences: Many[Sequence]) -> None:
        wanted = [
            self._pool.blocks_for(sequence.num_tokens) - len(sequence.block_table)
            for sequence in sequences
        ]
        if not self._pool.can_allocate(sum(wanted)):
            raise ValueError(f"{sum(wanted)} more blocks are too many, {self._pool.num_free} left")
        for sequence, num_blocks in zip(sequences, wanted, strict=True):
            if num_blocks:
                sequence.block_table.extend(self._pool.allocate(num_blocks))
