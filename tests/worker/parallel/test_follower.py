"""A follower ends when it is alone, and when it cannot copy; `test_executor` sees it compute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from scripts.models.make_model import make_model
from tests.worker.compute.processes import CPU, Processes
from wire.process.log import configure
from wire.transfer import Rectangle
from worker.compute.model import load_model
from worker.compute.ranks import Ranks
from worker.executor.torch import layout_of
from worker.model.config import read_config
from worker.parallel.commands import Verb, send
from worker.parallel.follower import follow
from worker.parallel.kv_copies import RemotePart, Steps
from worker.parallel.partition import parts_of

NUM_BLOCKS, NUM_WINDOW_BLOCKS, BLOCK_SIZE = 8, 3, 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return make_model(directory, family="gemma3_text", num_hidden_layers=3, sliding_window=6)


def follow_with(ranks: Ranks, path: Path) -> None:
    config = read_config(path)
    parts = parts_of(layout_of(config, torch.float32), config, 2, 1)
    follow(load_model(path, torch.float32, CPU, ranks=ranks), parts[1], ranks)


def lead_and_die(ranks: Ranks, path: Path) -> None:
    if ranks.is_leader:
        send(ranks, Verb.ALLOCATE, NUM_BLOCKS, BLOCK_SIZE)
        os._exit(1)
    follow_with(ranks, path)


def test_it_ends_when_the_leader_has_died(path: Path, tmp_path: Path) -> None:
    with Processes(2, tmp_path) as started:
        outcomes = started.outcomes(2, 1, lead_and_die, path)
    assert not any(is_done for is_done, _ in outcomes)


def ask_for_what_it_does_not_have(ranks: Ranks, path: Path, log: Path) -> None:
    if not ranks.is_leader:
        configure("info", log.open("w", buffering=1))  # as stderr is
        follow_with(ranks, path)
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
