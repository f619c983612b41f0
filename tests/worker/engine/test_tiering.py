"""Blocks go down to tiers and come back: the texts stay the oracle's, and nothing leaks."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.worker.tiers.lazy import LazyTiers
from tests.worker.workload import Request, Workload
from worker.engine.engine import Engine
from worker.tiers.store import TierFigures

NUM_WORKLOADS = int(os.environ.get("BATON_WORKLOADS", "160")) // 2


class TieredWorkload(Workload):
    """A workload whose engine has tiers; a copy ends some steps after it was started."""

    def __init__(self, seed: int, folder: Path, **settings: Any) -> None:
        draw = random.Random(seed)
        rooms = draw.choice([0, 1, 9, 100]), draw.choice([0, 1, 9, 100, 100])
        self.tiers = LazyTiers(folder, *rooms, draw, clock=lambda: self.now)
        super().__init__(seed, prefix_cache=True, **settings)

    def _engine(self, settings: dict[str, Any]) -> Engine:
        engine = super()._engine(settings)
        answer = self.tiers.draw.choice([None, 0.0, 1e9])
        engine.seconds_to_compute = lambda num_tokens: answer  # type: ignore[method-assign]
        engine.add_tiers(self.tiers.open)
        return engine

    def _request(self, request_id: int) -> Request:
        """Make one with a long beginning that others have too."""
        request = super()._request(request_id)
        head = [self.draw.choice([3, 4])] * self.draw.randint(4, 20)
        request.prompt = (*head, *request.prompt)
        return request

    def check(self) -> None:
        self.tiers.run_some()
        super().check()

    def _rest(self) -> None:
        while self.tiers.num_jobs or self.engine.has_work():
            self.tiers.copying.close(0)
            self.tiers.writing.close(0)
            if self.engine.has_work():
                assert not self.engine.step()
        super()._rest()

    @property
    def figures(self) -> TierFigures:
        assert self.engine.tiering is not None
        return self.engine.tiering.store.figures(self.engine.pool.block_size)


@pytest.mark.parametrize("group", range(4))
def test_no_text_changes_and_nothing_leaks(tmp_path: Path, group: int) -> None:
    loaded = {"host": 0, "disk": 0}
    for seed in range(group, NUM_WORKLOADS, 4):
        try:
            for _ in range(2):  # the second finds what the first has left on disk
                workload = TieredWorkload(seed, tmp_path / str(seed))
                workload.run()
                workload.tiers.close()
                loaded["host"] += workload.figures.host_tokens
                loaded["disk"] += workload.figures.disk_tokens
        except BaseException as error:
            error.add_note(f"workload {seed}")
            raise
    assert min(loaded.values()) > 0, loaded
