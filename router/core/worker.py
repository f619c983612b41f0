"""One worker as the router knows it: what it said of itself, and what is placed on it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from wire.frames import Role
from wire.payloads import HelloDetail, Load


class WorkerState(StrEnum):
    """Where a worker is in its life, as `/v1/cluster` shows it."""

    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process, what it said of itself and what this router has placed on it.

    `is_stalled` while its engine stands still in one step, though it beats.
    """

    identity: bytes
    role: Role
    rank: int
    epoch: int
    detail: HelloDetail
    last_seen: float
    state: WorkerState = WorkerState.JOINING

    lost_at: float = 0.0
    is_stalled: bool = False

    # From its last HEARTBEAT.
    load: Load | None = None
    step: int = 0
    running: int = 0
    waiting: int = 0

    # Ours: attempts that refer to it, those of them that occupy it, and their prompt tokens.
    attempts: set[int] = field(default_factory=set)
    num_active: int = 0
    prompt_tokens: int = 0
    # Blocks promised to attempts that no heartbeat has shown as used yet.
    promised: dict[int, int] = field(default_factory=dict)
    promised_blocks: int = 0
    # Blocks of attempts that were ended to make room, which no heartbeat has shown as free yet.
    returning_blocks: int = 0
    _settling: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.role.name.lower()}-{self.rank}"

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def available_blocks(self) -> int:
        """Blocks that a new request may count on: free or cached, less what is promised."""
        if self.load is None:
            return 0
        return self.load.free + self.load.cached - self.promised_blocks

    def promise(self, request_id: int, num_blocks: int) -> None:
        """Set blocks aside for an attempt until a heartbeat shows them as used."""
        self.promised[request_id] = num_blocks
        self.promised_blocks += num_blocks

    def settle(self, request_id: int) -> None:
        """The attempt holds its blocks now: the next heartbeat counts them."""
        if request_id in self.promised:
            self._settling.add(request_id)

    def unpromise(self, request_id: int) -> None:
        """Forget what was promised to an attempt; idempotent."""
        self.promised_blocks -= self.promised.pop(request_id, 0)
        self._settling.discard(request_id)

    def on_load(self, load: Load) -> None:
        """Take the blocks of a heartbeat; promises settled before it are in `used` now."""
        self.load, self.returning_blocks = load, 0
        for request_id in tuple(self._settling):
            self.unpromise(request_id)
