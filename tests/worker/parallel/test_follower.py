"""A follower computes its part of the KV as it is told, and ends when it is told or left alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import PagedBatch
from kernels.contract import Scratch
from scripts.models.make_model import make_model
from tests.kv import whole
from tests.worker.compute.processes import CPU, Processes
from wire.process.log import configure
from wire.transfer import Rectangle
from worker.compute.model import load_model
from worker.compute.ranks import Ranks
from worker.executor.torch import Step, layout_of, make_cache
from worker.model.config import read_config
from worker.parallel.commands import Verb, send, send_step
from worker.parallel.follower import follow
from worker.parallel.kv_cache import Copying, ShardedKVCache
from worker.parallel.kv_copies import OwnPart, RemotePart, Steps
from worker.parallel.microbatches import compute
from worker.parallel.partition import Part, parts_of

NUM_BLOCKS, NUM_WINDOW_BLOCKS, BLOCK_SIZE, NUM_TOKENS = 8, 3, 4, 15
TABLE = [5, 2, 7, 0]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return make_model(directory, family="gemma3_text", num_hidden_layers=3, sliding_window=6)


def step_of(tokens: range, num_pieces: int) -> Step:
    """Return a step that reads some tokens of a prompt, of which the earlier ones are read."""
    numbers = torch.arange(tokens.start, tokens.stop, dtype=torch.int32)
    slots = [TABLE[it // BLOCK_SIZE] * BLOCK_SIZE + it % BLOCK_SIZE for it in tokens]
    batch = PagedBatch(
        slots=torch.tensor(slots, dtype=torch.int32),
        query_starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
        context_lens=torch.tensor([tokens.stop], dtype=torch.int32),
        block_tables=torch.tensor([TABLE], dtype=torch.int32),
    )
    rows = torch.tensor([len(tokens) - 1], dtype=torch.int32)
    windowed = replace(batch, scratch=Scratch())
    return Step(numbers * 7 % 256, numbers, rows, batch, num_pieces, windowed=windowed)


def steps_of_all() -> list[Step]:
    return [step_of(range(11), 2), step_of(range(11, NUM_TOKENS), 1)]


def kv_of(packed: memoryview) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(packed, np.float32).copy())


def rectangles(path: Path) -> list[Rectangle]:
    layout = layout_of(read_config(path), torch.float32)
    return [whole(layout, 0, NUM_TOKENS, it) for it in range(len(layout.groups))]


def lead(ranks: Ranks, path: Path) -> list[torch.Tensor]:
    """Compute the steps with others that follow; return the KV of all."""
    model, config = load_model(path, torch.float32, CPU, ranks=ranks), read_config(path)
    layout = layout_of(config, torch.float32)
    parts = parts_of(layout, config, ranks.shard.size, ranks.shard.stages)
    own = parts[ranks.shard.process]
    if not ranks.is_leader:
        follow(model, own, ranks)
        return []
    send(ranks, Verb.ALLOCATE, NUM_BLOCKS, BLOCK_SIZE)
    cache, steps = make_cache(model, own.layout, NUM_BLOCKS, BLOCK_SIZE), Steps()
    for step in steps_of_all():
        send_step(ranks, step)
        compute(model, cache, step)
        steps.add()
    asking = [RemotePart(ranks, part, steps) for part in parts[1:]]
    every: list[tuple[Part, Copying]] = [(own, OwnPart(cache, own))]
    every += zip(parts[1:], asking, strict=True)
    sharded = ShardedKVCache(layout, cache, every)
    send(ranks, Verb.END)  # steps have ended, copies have not
    found = [kv_of(sharded.pack(TABLE, it)) for it in rectangles(path)]
    for it in asking:
        it.end()
    return found


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_all_parts_have_the_kv_of_one_process(
    size: int, stages: int, processes: Processes, path: Path
) -> None:
    found, *_ = processes.run(size, stages, lead, path)
    model = load_model(path, torch.float32, CPU)
    cache = make_cache(model, layout_of(model.config, torch.float32), NUM_BLOCKS, BLOCK_SIZE)
    for step in steps_of_all():
        compute(model, cache, step)
    wanted = [kv_of(cache.pack(TABLE, it)) for it in rectangles(path)]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def end(ranks: Ranks, path: Path) -> None:
    config = read_config(path)
    if ranks.is_leader:
        return send(ranks, Verb.END)
    parts = parts_of(layout_of(config, torch.float32), config, 2, 1)
    follow(load_model(path, torch.float32, CPU, ranks=ranks), parts[1], ranks)


def test_it_ends_when_it_is_told_even_before_there_is_a_cache(
    processes: Processes, path: Path
) -> None:
    processes.run(2, 1, end, path)


def lead_and_die(ranks: Ranks, path: Path) -> None:
    if ranks.is_leader:
        send(ranks, Verb.ALLOCATE, NUM_BLOCKS, BLOCK_SIZE)
        os._exit(1)
    lead(ranks, path)


def test_it_ends_when_the_leader_has_died(path: Path, tmp_path: Path) -> None:
    with Processes(2, tmp_path) as started:
        outcomes = started.outcomes(2, 1, lead_and_die, path)
    assert not any(is_done for is_done, _ in outcomes)


def ask_for_what_it_does_not_have(ranks: Ranks, path: Path, log: Path) -> None:
    if not ranks.is_leader:
        configure("info", log.open("w", buffering=1))  # as stderr is
        lead(ranks, path)
        return
    config = read_config(path)
    parts = parts_of(layout_of(config, torch.float32), config, 2, 1)
    load_model(path, torch.float32, CPU, ranks=ranks)
    send(ranks, Verb.ALLOCATE, NUM_BLOCKS, BLOCK_SIZE, 0, NUM_WINDOW_BLOCKS)
    (windowed,) = (it for it, group in enumerate(parts[1].layout.kv_groups) if group.window)
    rectangle = Rectangle(windowed, range(1), range(1, 2), range(BLOCK_SIZE))
    RemotePart(ranks, parts[1], Steps()).pack([NUM_WINDOW_BLOCKS], rectangle)


def test_it_ends_when_it_cannot_copy_so_that_nobody_waits_for_ever(
    path: Path, tmp_path: Path
) -> None:
    with Processes(2, tmp_path) as started:
        outcomes = started.outcomes(2, 1, ask_for_what_it_does_not_have, path, tmp_path / "log")
    assert not any(is_done for is_done, _ in outcomes)
    assert outcomes[1] == (False, "died")
    assert "cannot copy KV for the leader" in (tmp_path / "log").read_text()
