"""Steps in flight: nobody can tell from the outputs that the host did not wait for the device.

`tests.worker.late` is the device; the texts are the oracle's.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from tests.worker.engine.hashed import GREEDY, of_kind, run
from tests.worker.engine.hashed import text as text_of
from tests.worker.late import LateExecutor
from tests.worker.workload import (
    LAYOUTS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Request,
    Workload,
    full_text,
)
from wire.errors import ErrorCode
from wire.layout import KVLayout
from worker.engine.engine import Engine
from worker.engine.outputs import Failed, Token
from worker.engine.sequence import Sequence
from worker.executor.contract import ModelInfo
from worker.executor.hash import EOS_TOKEN_IDS, LAYOUT

NUM_WORKLOADS = 160


class LateWorkload(Workload):
    """A random workload on a device that computes late.

    Some requests ask for what the host has to draw, some steps fail, most engines draft nothing.
    """

    def __init__(self, seed: int, layout: KVLayout) -> None:
        self.other = random.Random(f"late {seed}")
        settings: dict[str, Any] = {} if seed % 8 == 0 else {"speculate": None}
        if seed % 4 == 1:
            settings |= {"swap_bytes": 1 << 20, "block_size": 4, "num_blocks": 12}
        if seed % 3:
            settings["max_ubatch_tokens"] = 64
        super().__init__(seed, layout, **settings)
        if "swap_bytes" in settings:
            self.engine.swap.costs.copy_bytes_per_s = 1e12

    def _executor(self) -> LateExecutor:
        info = ModelInfo("late", "late", VOCAB_SIZE, MAX_MODEL_LEN, EOS_TOKEN_IDS, self.layout)
        self.late = LateExecutor(
            info,
            self.other,
            eagerness=self.other.choice([0, 0, 0.5]),
            failing=self.other.choice([0, 0, 0, 0.03]),
            refusing=self.other.choice([0, 0, 0.2]),
        )
        return self.late

    def _request(self, request_id: int) -> Request:
        request = super()._request(request_id)
        asked: dict[str, Any] = self.other.choice(
            [{}] * 12 + [{"logprobs": 0}, {"presence_penalty": 0.5}]
        )
        # Of two tenants neither reads its prompts to the end before the other begins.
        tenant = self.other.randint(0, 1)
        request.options = structs.replace(request.options, tenant=tenant, **asked)
        return request

    def check(self) -> None:
        super().check()
        self.late.device.tick()

    def _check_failure(self, request: Request, failed: Failed) -> None:
        if failed.code is ErrorCode.MODEL_FAILED:
            assert self.late.num_failed
        else:
            super()._check_failure(request, failed)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_request_ends_once_with_its_text(name: str) -> None:
    sums = Counter[str]()
    for seed in range(NUM_WORKLOADS if name == "all" else NUM_WORKLOADS // 8):
        try:
            workload = LateWorkload(seed, LAYOUTS[name])
            workload.run()
        except BaseException as error:
            error.add_note(f"workload {seed}, {name}")
            raise
        counters = workload.engine.counters
        assert workload.drafter is None or not workload.late.num_behind
        sums["behind"] += workload.late.num_behind
        sums["failed"] += workload.late.num_failed
        sums["steps"] += counters.steps
        sums["preemptions"] += counters.preemptions
        sums["swaps"] += counters.swaps_in
        assert counters.swaps_in <= counters.swaps_out <= counters.preemptions
    # Else the property would hold of nothing.
    assert (sums["behind"] > 0.2 * sums["steps"]) is not LAYOUTS[name].has_state
    if name == "all":
        assert min(sums["failed"], sums["preemptions"], sums["swaps"]) > 10, sums


def late_engine(**settings: Any) -> tuple[Engine, LateExecutor]:
    info = ModelInfo("late", "late", VOCAB_SIZE, MAX_MODEL_LEN, EOS_TOKEN_IDS, LAYOUT)
    executor = LateExecutor(info, random.Random(0))
    return Engine(executor, **{"num_blocks": 40, "block_size": 4} | settings), executor


def test_a_step_is_read_after_the_next_has_begun() -> None:
    engine, executor = late_engine()
    engine.add(Sequence(1, [3, 4, 5], GREEDY, 4))
    told, asked = [], []
    while engine.has_work():
        told.append([it.index for it in engine.step() if isinstance(it, Token)])
        asked.append(executor.device.num_asked - executor.device.num_run)
    # The step that reads the prompt is read at once; then one step is in flight, up to the last.
    assert told == [[0], [], [1], [2], [3]]
    assert [number > 0 for number in asked] == [False, True, True, True, False]
    assert executor.num_behind == 2, "the last token is known to be the last"


def test_a_token_that_was_drawn_before_the_deadline_is_told() -> None:
    now = [0.0]
    engine, _ = late_engine(clock=lambda: now[0])
    engine.add(Sequence(1, [3, 4, 5], structs.replace(GREEDY, deadline_ms=5_000), 2))
    outputs = [*engine.step(), *engine.step()]
    now[0] = 5.0
    outputs += run(engine)
    assert not of_kind(outputs, Failed)
    assert [it.finish_reason for it in of_kind(outputs, Token)] == [None, "length"]


def test_a_step_that_fails_behind_another_fails_one_sequence() -> None:
    engine, executor = late_engine()
    for request_id in (1, 2):
        engine.add(Sequence(request_id, [3, 4, request_id], GREEDY, 9))
    outputs = [*engine.step(), *engine.step()]
    executor.fails_at = 1
    outputs += run(engine)
    assert [it.request_id for it in of_kind(outputs, Failed)] == [2]
    assert text_of(outputs, 1) == [*full_text((3, 4, 1), 9, GREEDY)]
    assert len(text_of(outputs, 2)) == 2, "the step before is committed"
