"""A device that computes late: what it is asked for runs in order, as late as anybody lets it.

`LateExecutor` is the hash executor on it.  The host's memory that the device reads is read when it
computes, and what it writes there is poison until then, and again once it has been read.  So a
token that is read too early, fed from the wrong row, or KV that is copied before it is there,
changes a text or fails.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np

from wire.errors import ErrorCode
from worker.executor.batch import Batch, rows_of
from worker.executor.contract import ModelInfo, SampledToken, SequenceFailed
from worker.executor.hash import HashExecutor, HashKVCache, Vocabulary

# No vocabulary of a test has it.
POISON = 1 << 29


class LateDevice:
    """Calls in the order in which they were asked for; each runs when somebody waits for it.

    With `eagerness` above 0 some run before, at random moments.
    """

    def __init__(self, draw: random.Random, eagerness: float) -> None:
        self.num_asked = self.num_run = 0
        self.is_running = False
        self._calls: deque[Callable[[], None]] = deque()
        self._draw, self._eagerness = draw, eagerness

    def ask(self, call: Callable[[], None]) -> int:
        """Have a call run at some time; return what `wait` takes to wait for it."""
        self._calls.append(call)
        self.num_asked += 1
        return self.num_asked

    def wait(self, number: int) -> None:
        self.is_running = True
        while self.num_run < number:
            self._calls.popleft()()
            self.num_run += 1
        self.is_running = False

    def tick(self) -> None:
        """Let some time pass."""
        if self._draw.random() < self._eagerness:
            self.wait(self._draw.randint(self.num_run, self.num_asked))


class LateCache(HashKVCache):
    """Copies wait for what was asked of the device before the last `mark`, and for nothing else."""

    def __init__(self, device: LateDevice, *sizes: Any) -> None:
        super().__init__(*sizes)
        self._device, self._marked = device, 0

    def mark(self) -> None:
        self._marked = self._device.num_asked

    def pack(self, *args: Any) -> memoryview:
        self._wait()
        return super().pack(*args)

    def unpack(self, *args: Any) -> None:
        self._wait()
        super().unpack(*args)

    def _wait(self) -> None:
        if not self._device.is_running:
            self._device.wait(self._marked)


class LateDrawn:
    """Tokens that the device writes to memory of the host."""

    def __init__(self, device: LateDevice, count: int) -> None:
        self.token_ids = [POISON] * count
        self.number = 0
        self._device = device

    def __call__(self) -> list[SampledToken]:
        self._device.wait(self.number)
        token_ids, self.token_ids = self.token_ids, []
        return [SampledToken(token_id) for token_id in token_ids]


class LateExecutor(HashExecutor):
    """Implements `worker.executor.contract.Drawer`.

    It draws for whoever asks for no logprobs and no penalties; now and then it leaves a step to the
    host, or fails one sequence of a step.

    Attributes:
        num_behind: How many steps it was asked for while one before had not been read.
        num_failed: How many steps it has refused.
        fails_at: Which sequence of the next one it refuses.
    """

    def __init__(
        self,
        info: ModelInfo,
        draw: random.Random,
        *,
        eagerness: float = 0.0,
        failing: float = 0.0,
        refusing: float = 0.0,
    ) -> None:
        super().__init__(info)
        self.device = LateDevice(draw, eagerness)
        self.num_behind = self.num_failed = 0
        self.fails_at: int | None = None
        self._draw, self._failing, self._refusing = draw, failing, refusing
        self._drawn: list[int] = []  # on the device, of the last draw
        self._vocabulary = Vocabulary(info.vocab_size, info.eos_token_ids)

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> HashKVCache:
        sizes = num_blocks, block_size, self.info.layout, num_states, num_window_blocks
        self._cache = LateCache(self.device, *sizes)
        return self._cache

    def forward(self, batch: Batch) -> list[int]:
        cache = self._cache
        assert isinstance(cache, LateCache)
        self._fail(batch)
        self.num_behind += bool((batch.token_ids < 0).any())
        digests: list[int] = []
        # Where layers with a window have their KV is said when the step is asked for.
        window_blocks = deepcopy(cache.window_blocks)

        def run() -> None:
            now, cache.window_blocks = cache.window_blocks, window_blocks
            token_ids = batch.token_ids.copy()
            for place in np.flatnonzero(token_ids < 0):
                token_ids[place] = self._drawn[~token_ids[place]]
            cache.compute(token_ids, batch)
            sequences = np.searchsorted(batch.query_starts, batch.sample_rows, side="right") - 1
            for index, position in zip(sequences, batch.positions[batch.sample_rows], strict=True):
                digests.append(cache.digest(batch.block_tables[index], int(position) + 1))
            cache.window_blocks = now

        if batch.kind == "decode" and not self.info.layout.has_state:
            self.device.ask(run)
        else:  # slots of states are taken as the host goes
            self.device.wait(self.device.ask(run))
        cache.mark()
        return digests

    def sample(self, logits: list[int], batch: Batch) -> list[SampledToken]:
        known = [*batch.token_ids.tolist()]
        for sampling in batch.samplings:
            known += sampling.token_ids
        assert min(known) >= 0, "the host is to draw without knowing the tokens before"
        self._fail(batch)
        self.device.wait(self.device.num_asked)
        return super().sample(logits, batch)

    def can_draw(self, batch: Batch) -> bool:
        return self._draw.random() >= self._refusing and self._is_plain(batch)

    def _is_plain(self, batch: Batch) -> bool:
        asked = [it.options for it in batch.samplings]
        is_plain = all(it.logprobs is None and not it.has_penalties for it in asked)
        return is_plain and not batch.scorings and not any(it.drafts for it in batch.samplings)

    def draw(self, logits: list[int], batch: Batch) -> LateDrawn:
        assert self._is_plain(batch)
        drawn = LateDrawn(self.device, len(batch.sample_rows))

        def run() -> None:
            rows = zip(logits, rows_of(batch.samplings), strict=True)
            self._drawn = [self._vocabulary.draw(digest, row).token_id for digest, row in rows]

        def copy() -> None:
            drawn.token_ids[:] = self._drawn

        self.device.ask(run)
        drawn.number = self.device.ask(copy)
        return drawn

    def _fail(self, batch: Batch) -> None:
        index, self.fails_at = self.fails_at, None
        if index is None and self._draw.random() < self._failing:
            index = self._draw.randrange(len(batch.context_lens))
        if index is not None:
            self.num_failed += 1
            raise SequenceFailed(index, "chance", ErrorCode.MODEL_FAILED)
