"""The plan of one step: what the scheduler decided, as an object that the engine carries out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from worker.engine.batch import Chunk
from worker.engine.sequence import Sequence
from worker.engine.sharing import Place
from worker.engine.swap import Swap
from worker.executor.batch import BatchType

# In a step of so many tokens, what any step costs is little beside what its tokens cost.
LARGE_STEP_TOKENS: Final = 512


@dataclass(slots=True)
class Plan:
    """One step: what is computed, and what the making of the plan did to whom.

    Attributes:
        decode: One token of each, the one sampled last, and drafts of those after it.
        prefill: Pieces of prompts, or of what a preemption made to be computed again.
        preempted: They lost their blocks and wait.
        swapped_out: The KV to be saved of those among them that will not be computed again.
        swapped_in: The KV to be put back of those that have blocks again.
        started: They got their first blocks now and were never running before.
        reserved: Reservations that got their blocks now.
        failed: They can never fit and hold nothing any more.
        filled: The first block that each of `prefill` makes full.  Whoever needs it waits.
        overdue: Their deadline has passed.  They hold nothing any more, except that one whose KV
            may be on its way to another worker keeps its blocks until that is over.
    """

    decode: list[Chunk] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swapped_out: list[Swap] = field(default_factory=list)
    swapped_in: list[Swap] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)
    overdue: list[Sequence] = field(default_factory=list)
    filled: set[Place] = field(default_factory=set)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decode + self.prefill

    @property
    def kind(self) -> BatchType:
        if not self.prefill:
            return BatchType.DECODE
        return BatchType.MIXED if self.decode else BatchType.PREFILL

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefill)

    def is_mostly_prefill(self, max_ubatch_tokens: int) -> bool:
        """Whether prompts fill at least half of the step, and half of what makes a step large."""
        large = min(max_ubatch_tokens, LARGE_STEP_TOKENS)
        return bool(self.prefill) and 2 * self.num_prefill_tokens >= max(self.num_tokens, large)

    @property
    def is_progress(self) -> bool:
        """Whether anything changed: if not, planning again is no use until someone else acts."""
        admitted = self.started or self.reserved or self.swapped_in
        ended = self.failed or self.overdue
        return bool(self.decode or self.prefill or self.preempted or admitted or ended)
