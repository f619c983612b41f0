"""Blocks go down to tiers and come back: the texts stay the oracle's, and nothing leaks."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable
from collections.abc import Sequence as Many
from errno import EIO, ENOSPC
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.worker.engine.hashed import GREEDY, engine_of, of_kind, run, text
from tests.worker.tiers.lazy import LazyTiers
from tests.worker.workload import Request, Workload
from wire.parts import Buffer
from wire.prefix import prefix_hashes
from worker.engine.engine import Engine
from worker.engine.loads import STALL_S
from worker.engine.outputs import Failed, Output, Reserved, Started
from worker.engine.sequence import Sequence
from worker.tiers.disk import Files, Slot
from worker.tiers.keys import BlockKey
from worker.tiers.opening import TierSettings
from worker.tiers.records import Checksum, Encryption
from worker.tiers.store import TierFigures

NUM_WORKLOADS = int(os.environ.get("BATON_WORKLOADS", "160")) // 2


class Flaky(Files):
    """A disk that fails now and then, in the midst of a write too."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.is_failing = False

    def _may_fail(self) -> None:
        if self.is_failing and self._draw.random() < 0.1:
            raise OSError(self._draw.choice([EIO, ENOSPC]), "as in the field")

    def write(self, descriptor: int, parts: Many[Buffer], offset: int) -> None:
        super().write(descriptor, parts[:1], offset)
        self._may_fail()
        super().write(descriptor, parts, offset)

    def read(self, descriptor: int, num_bytes: int, offset: int) -> bytes:
        self._may_fail()
        return super().read(descriptor, num_bytes, offset)

    def synchronize(self, descriptor: int) -> None:
        self._may_fail()


class TieredWorkload(Workload):
    """A workload whose engine has tiers; a copy ends some steps after it was started."""

    def __init__(self, seed: int, folder: Path, **settings: Any) -> None:
        draw = random.Random(seed)
        rooms = draw.choice([0, 1, 9, 100]), draw.choice([0, 1, 9, 100, 100])
        self.files, is_flaky = Flaky(draw), draw.random() < 0.3
        seal = Encryption(b"secret") if draw.random() < 0.2 else Checksum()
        self.tiers = LazyTiers(
            folder, *rooms, draw, files=self.files, seal=seal, clock=lambda: self.now
        )
        super().__init__(seed, prefix_cache=True, **settings)
        self.files.is_failing = is_flaky

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
        assert self.engine.tiering is not None
        self.engine.tiering.unsaved.clear()  # else a disk that recovers now would get them
        super()._rest()

    @property
    def figures(self) -> TierFigures:
        assert self.engine.tiering is not None
        return self.engine.tiering.figures()


@pytest.mark.parametrize("group", range(4))
def test_no_text_changes_and_nothing_leaks(tmp_path: Path, group: int) -> None:
    loaded = {"host": 0, "disk": 0}
    for seed in range(group, NUM_WORKLOADS, 4):
        try:
            for _ in range(2):  # the second finds what the first has left on disk
                workload = TieredWorkload(seed, tmp_path / str(seed))
                workload.run()
                workload.tiers.close()
                loaded["host"] += workload.figures.host.loaded_tokens
                loaded["disk"] += workload.figures.disk.loaded_tokens
        except BaseException as error:
            error.add_note(f"workload {seed}")
            raise
    assert min(loaded.values()) > 0, loaded


class Stage:
    """An engine with tiers, whose copies end when a test says so."""

    def __init__(self, folder: Path, host_blocks: int = 0, num_blocks: int = 16) -> None:
        self.now = 0.0
        rooms = host_blocks, 0 if host_blocks else 99
        self.tiers = LazyTiers(folder, *rooms, clock=lambda: self.now)
        self.engine = engine_of(num_blocks, clock=lambda: self.now)
        self.compute_s: float | None = None
        self.engine.seconds_to_compute = lambda _: self.compute_s  # type: ignore[method-assign, assignment]
        self.engine.add_tiers(self.tiers.open)
        self.outputs: list[Output] = []

    def add(self, request_id: int, prompt: Iterable[int], limit: int = 3) -> None:
        self.engine.add(Sequence(request_id, prompt, GREEDY, limit))

    def step(self) -> None:
        """Step until nothing is left to do but copies."""
        while self.engine.has_work():
            self.outputs += self.engine.step()
            self.engine.check()

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.engine.has_work() or self.tiers.num_jobs:
            self.tiers.copying.close(0)
            self.tiers.writing.close(0)
            self.step()

    def saved(self, prompt: Iterable[int]) -> list[int]:
        """Compute a prompt, have it saved, and drop it from the pool; return its text."""
        self.add(0, prompt)
        self.run()
        self.engine.pool.free(self.engine.pool.allocate(self.engine.pool.num_blocks))
        assert self.engine.pool.num_cached == 0
        return self.text(0)

    def text(self, request_id: int) -> list[int]:
        return text(self.outputs, request_id)

    def cached_tokens(self, request_id: int) -> int:
        (started,) = (it for it in of_kind(self.outputs, Started) if it.request_id == request_id)
        return started.cached_tokens


PROMPT = range(10, 31)


@pytest.fixture(params=[0, 30], ids=["disk", "host"])
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    return Stage(tmp_path, request.param)


def test_a_prompt_is_loaded_while_others_go_on(stage: Stage) -> None:
    expected = stage.saved(PROMPT)
    stage.add(1, PROMPT)
    stage.add(2, [5] * 9)
    stage.step()
    assert len(stage.text(2)) == 3 and not stage.text(1), "it came later, but does not wait"
    assert not stage.engine.has_work() and stage.engine.num_waiting == 1
    stage.run()
    assert stage.text(1) == expected and stage.cached_tokens(1) == 20
    assert stage.engine.tiering is not None
    figures = stage.engine.tiering.figures()
    assert figures.host.loaded_tokens + figures.disk.loaded_tokens == 20
    assert stage.engine.load().used == 0


def test_a_heartbeat_names_the_tier_that_lost_a_block(tmp_path: Path) -> None:
    stage = Stage(tmp_path, host_blocks=6)
    stage.saved(PROMPT)
    assert stage.engine.load().losses == []
    stage.saved(range(50, 71))
    load = stage.engine.load()
    assert [tier for tier, _ in load.losses] == ["host"] and load.host is not None
    assert load.host.blocks == load.host.max_blocks == 6 and load.disk is None
    assert set(load.host.evicted) < set(prefix_hashes(PROMPT, stage.engine.pool.block_size))


def test_equal_prompts_wait_for_one_load(stage: Stage) -> None:
    expected = stage.saved(PROMPT)
    for request_id in (1, 2):
        stage.add(request_id, PROMPT)
    stage.step()
    assert stage.tiers.num_jobs == 1
    stage.run()
    for request_id in (1, 2):
        assert stage.text(request_id) == expected and stage.cached_tokens(request_id) == 20


def test_another_salt_finds_nothing(stage: Stage) -> None:
    expected = stage.saved(PROMPT)
    for request_id, salt, cached_tokens in ((1, "a", 0), (2, "b", 0), (3, "a", 20), (4, "", 20)):
        options = structs.replace(GREEDY, cache_salt=salt)
        stage.engine.add(Sequence(request_id, PROMPT, options, 3))
        stage.run()
        assert stage.text(request_id) == expected
        assert stage.cached_tokens(request_id) == cached_tokens
        stage.engine.pool.free(stage.engine.pool.allocate(16))


def test_what_follows_cached_blocks_is_loaded_behind_them(stage: Stage) -> None:
    expected = stage.saved(PROMPT)
    stage.add(1, PROMPT[:9])
    stage.run()
    stage.add(2, PROMPT)
    stage.run()
    assert stage.text(2) == expected and stage.cached_tokens(2) == 20


def test_waiting_for_room_is_no_use_of_a_block(stage: Stage) -> None:
    stage.saved(PROMPT)
    stage.add(1, PROMPT[:9])
    stage.run()
    tiering, pool = stage.engine.tiering, stage.engine.pool
    assert tiering is not None
    used: list[int] = []
    tiering.store.use = lambda chain: used.append(chain.length)  # type: ignore[method-assign]
    sequence, held = Sequence(2, PROMPT, GREEDY, 3), pool.allocate(pool.num_free)
    for _ in range(9):
        assert not tiering.is_awaited(sequence)
    assert not used
    pool.free(held)
    for _ in range(9):
        assert tiering.is_awaited(sequence)
    assert used == [2]
    stage.run()


def test_a_cancelled_request_leaves_its_load_to_the_next(stage: Stage) -> None:
    expected = stage.saved(PROMPT)
    stage.add(1, PROMPT)
    stage.step()
    stage.engine.cancel(1)
    stage.step()
    assert stage.engine.load().used == 5, "somebody still writes to these blocks"
    stage.run()
    assert stage.engine.load().used == 0
    stage.add(2, PROMPT)
    stage.step()
    assert stage.text(2) == expected and stage.cached_tokens(2) == 20


def test_a_stuck_tier_is_waited_for_no_longer_than_computing_takes(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    expected = stage.saved(PROMPT)
    stage.compute_s = 3.0
    stage.add(1, PROMPT)
    stage.step()
    assert stage.engine.idle_s() == STALL_S and not stage.text(1)
    stage.now += STALL_S
    assert stage.engine.has_work()
    stage.step()
    assert stage.text(1) == expected and stage.cached_tokens(1) == 0
    stage.add(2, [*PROMPT[:8], 5, 5])
    stage.add(3, [6] * 9)
    stage.step()
    assert stage.text(2) and stage.text(3) and stage.tiers.num_jobs, "its disk is not asked again"
    stage.run()
    assert stage.engine.load().used == 0 and stage.engine.idle_s() is None


LONG = range(10, 63)  # 13 of 16 blocks are loaded
RECEIVED = range(100, 140)


def receive(stage: Stage) -> None:
    """The KV of a request comes from a prefill worker, once there are blocks for it."""
    assert of_kind(stage.outputs, Reserved)
    stage.engine.begin_decode(9, [*RECEIVED, 7], GREEDY, 2)
    stage.step()
    assert len(stage.text(9)) == 2


def test_kv_that_is_received_waits_for_a_load_that_has_all_blocks(stage: Stage) -> None:
    expected = stage.saved(LONG)
    stage.add(1, LONG)
    stage.step()
    stage.engine.reserve(9, RECEIVED, is_claimed=True)
    stage.step()
    assert not of_kind(stage.outputs, Reserved) and stage.tiers.num_jobs == 1
    stage.run()
    receive(stage)
    stage.run()
    assert stage.text(1) == expected and not of_kind(stage.outputs, Failed)
    assert stage.engine.load().used == 0


def test_kv_that_is_received_gets_the_blocks_of_a_stuck_load(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    expected = stage.saved(LONG)
    stage.compute_s = 3.0
    stage.add(1, LONG)
    stage.step()
    stage.engine.reserve(9, RECEIVED, is_claimed=True)
    stage.step()
    assert not of_kind(stage.outputs, Reserved)
    stage.now += STALL_S
    stage.step()
    receive(stage)
    stage.tiers.copying.close(0)  # which has saved what was received
    stage.step()
    assert stage.text(1) == expected and len(stage.tiers.writing), "the disk still hangs"
    stage.run()
    stage.add(2, LONG)
    stage.run()
    assert stage.text(2) == expected and stage.engine.load().used == 0


def test_what_a_load_has_read_before_it_hangs_is_used(tmp_path: Path) -> None:
    stage, num_reads = Stage(tmp_path), count(1)
    expected = stage.saved(PROMPT)
    stage.compute_s = 3.0
    assert stage.tiers.disk is not None
    read = stage.tiers.disk.read

    def hang(slot: Slot, key: BlockKey) -> Buffer | None:
        if next(num_reads) == 3:
            stage.now += 4.0
            stage.step()  # the engine goes on meanwhile
            assert stage.text(1) == expected and stage.cached_tokens(1) == 8
            assert stage.engine.load().used == 0
        return read(slot, key)

    stage.tiers.disk.read = hang  # type: ignore[method-assign]
    stage.add(1, PROMPT)
    stage.run()
    assert next(num_reads) == 4 and stage.engine.load().used == 0
    stage.add(2, PROMPT)
    stage.run()
    assert stage.text(2) == expected and stage.cached_tokens(2) == 20, "as it is in the KV cache"


def test_what_takes_longer_to_load_is_computed(stage: Stage) -> None:
    expected = stage.saved(PROMPT)

    def slow_copy(block: int, kv: Buffer) -> None:
        stage.now += 1.0
        copy_in(block, kv)

    assert stage.engine.tiering is not None
    copies = stage.engine.tiering.store.copies
    copy_in, copies.copy_in = copies.copy_in, slow_copy  # type: ignore[method-assign]
    for request_id, compute_s, is_loaded in ((1, None, True), (2, 4.9, False), (3, 5.1, True)):
        stage.compute_s = compute_s
        stage.add(request_id, PROMPT)
        stage.run()
        assert stage.text(request_id) == expected
        assert stage.cached_tokens(request_id) == 20 * is_loaded, request_id
        stage.engine.pool.free(stage.engine.pool.allocate(16))


def test_a_damaged_file_costs_no_request(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    expected = stage.saved(PROMPT)
    path = tmp_path / "kv"
    content = bytearray(path.read_bytes())
    content[2 * len(content) // 5 + 3] ^= 4
    path.write_bytes(content)
    stage.add(1, PROMPT)
    stage.run()
    assert stage.text(1) == expected and stage.cached_tokens(1) == 8
    assert stage.engine.tiering is not None
    assert stage.engine.tiering.figures().failures["read"] == 1


def test_a_restarted_engine_finds_what_was_saved(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    expected = stage.saved(PROMPT)
    stage.engine.load()
    stage.tiers.close()
    again = Stage(tmp_path)
    again.engine.pool.republish()
    assert len(again.engine.load().stored) == 5, "a router hears of it before it is loaded"
    again.add(1, PROMPT)
    again.run()
    assert again.text(1) == expected and again.cached_tokens(1) == 20


def test_closing_writes_the_last_blocks(tmp_path: Path) -> None:
    settings = TierSettings(0, tmp_path, 1 << 20, "decode-0", ("m",), 64, None, time.monotonic)
    num_found = []
    for _ in range(2):
        engine = engine_of()
        engine.add_tiers(settings.open)
        assert engine.tiering is not None
        num_found.append(engine.tiering.figures().disk.blocks)
        engine.add(Sequence(1, PROMPT, GREEDY, 12))
        run(engine)
        engine.close_tiers(20.0)
    assert num_found == [0, 8]
