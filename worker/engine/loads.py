"""A load: blocks that are being read from tiers into the pool, while sequences wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Final

from worker.engine.blocks import ROOT, Prefix
from worker.tiers.store import Found, Progress

# A load that has not read a block for so long is given up, as its tier is stuck.
STALL_S: Final = 1.0

# How much longer than computing a load may take, which is the time to wake a busy thread.
GRACE_S: Final = 0.02


@dataclass(slots=True, eq=False)
class Load:
    """Blocks of the pool that a load references, and until when sequences wait for it.

    Attributes:
        prefix: The cached chain that the load continues.
        found: What is loaded, into the last of `blocks`.
        due_s: When to look whether the load is stuck.
        limit_s: When the blocks would have been computed instead; None if that is not known.
        progress: Shared with the thread that reads.
    """

    blocks: Sequence[int] = ()
    due_s: float = 0.0
    limit_s: float | None = None
    progress: Progress = field(default_factory=Progress)
    prefix: Prefix = ROOT
    found: Sequence[Found] = ()
    is_over: bool = False
    is_given_up: bool = False
    _num_seen: int = 0

    @classmethod
    def start(
        cls,
        blocks: Sequence[int],
        now: float,
        compute_s: float | None,
        prefix: Prefix = ROOT,
        found: Sequence[Found] = (),
    ) -> Load:
        """Return a load that starts now, of blocks that take `compute_s` to compute, if known."""
        limit_s = None if compute_s is None else now + compute_s + GRACE_S
        due_s = min(now + STALL_S, limit_s or inf)
        return cls(blocks, due_s, limit_s, prefix=prefix, found=found)

    @property
    def is_awaited(self) -> bool:
        return not (self.is_over or self.is_given_up)

    @property
    def has_stopped(self) -> bool:
        """Whether the load was given up and will not write to a block, even if its tier hangs."""
        return self.progress.is_stopped and not self.progress.lock.locked()

    @property
    def loaded(self) -> Iterator[tuple[Found, int]]:
        """The part of `found` that was loaded, in order, with the block that each is in."""
        fresh = self.blocks[len(self.blocks) - len(self.found) :]
        return islice(zip(self.found, fresh, strict=True), self.progress.num_loaded)

    def look(self, now: float) -> None:
        """Give up a load that is late or, since the last look, has made no progress."""
        if now < self.due_s:
            return
        is_late = self.limit_s is not None and now >= self.limit_s
        if is_late or self.progress.num_loaded == self._num_seen:
            self.is_given_up = self.progress.is_stopped = True
        self._num_seen, self.due_s = self.progress.num_loaded, now + STALL_S
        if self.limit_s is not None:
            self.due_s = min(self.due_s, self.limit_s)


NOTHING: Final = Load(is_over=True)
