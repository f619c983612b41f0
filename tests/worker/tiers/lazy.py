"""Tiers whose jobs run when a test says so, on the test's own thread."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.compute.contract import KVCache
from worker.tiers.copies import BlockCopies
from worker.tiers.disk import Disk, Files
from worker.tiers.disk_tier import DiskTier, HeldPrefixes
from worker.tiers.records import Checksum, RecordFormat, Seal
from worker.tiers.store import TierStore
from worker.tiers.threads import Results


class LazyThread:
    """Keeps its jobs until `run_one`; those that are awaited go first."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._jobs: list[tuple[bool, Callable[[], Any], Callable[[Any], object]]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def put(
        self,
        work: Callable[[], Any],
        done: Callable[[Any], object],
        *,
        is_awaited: bool = False,
    ) -> None:
        self._jobs.append((not is_awaited, work, done))

    def run_one(self) -> None:
        job = min(self._jobs, key=lambda job: job[0])
        self._jobs.remove(job)
        _, work, done = job
        result = work()
        self._results.add(lambda: done(result))

    def close(self, wait_s: float) -> bool:
        while self._jobs:
            self.run_one()
        return True


class LazyTiers:
    """Opens tiers for an engine: `open` is its `open_tiers`.

    Attributes:
        host_blocks, disk_blocks: The room of each tier; 0 for none.
        draw: How many jobs `run_some` runs.
    """

    def __init__(
        self,
        folder: Path,
        host_blocks: int,
        disk_blocks: int,
        draw: random.Random | None = None,
        *,
        files: Files | None = None,
        seal: Seal | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.folder, self.host_blocks, self.disk_blocks = folder, host_blocks, disk_blocks
        self.files, self.seal, self.clock = files, seal or Checksum(), clock
        self.draw = draw or random.Random(0)
        self.results = Results()
        self.copying, self.writing = LazyThread(self.results), LazyThread(self.results)
        self.disk: Disk | None = None

    def open(self, cache: KVCache, prefixes: HeldPrefixes) -> TierStore:
        copies, disk = BlockCopies(cache), None
        shared = {"context_blocks": 8, "clock": self.clock}
        if self.disk_blocks:
            record = RecordFormat(cache.block_size, copies.num_bytes, b"test", self.seal)
            max_bytes = self.disk_blocks * record.total_bytes
            self.disk = Disk(self.folder, record, max_bytes, self.files)
            sizes = {"block_bytes": copies.num_bytes, **shared}
            disk = DiskTier(self.disk, self.writing, prefixes, **sizes)  # type: ignore[arg-type]
            disk.open()
        host_bytes = self.host_blocks * copies.num_bytes
        parts = disk, self.copying, self.results, prefixes
        return TierStore(copies, host_bytes, *parts, **shared)  # type: ignore[arg-type]

    @property
    def num_jobs(self) -> int:
        return len(self.copying) + len(self.writing)

    def run_some(self) -> None:
        for _ in range(self.draw.choice([0, 0, 1, 1, 2, 9])):
            if threads := [it for it in (self.copying, self.writing) if len(it)]:
                self.draw.choice(threads).run_one()

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
