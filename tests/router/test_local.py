"""Child processes that stand in for workers: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from router import local
from router.config import Config
from router.core.cluster import ProcessState
from router.local import LocalWorkers, command, cores_of_workers, environment
from tests.router.children import is_gone, until
from wire.process.cores import format_cores
from wire.process.settings import EX_LEFT, ConfigError, parse
from worker.config import Config as WorkerConfig

OBEDIENT = "import sys, time; print('up', flush=True); time.sleep(60)"
# Where the output has one reader: what two processes write at once may share a line.
SILENT = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "open({path!r}, 'w').close(); time.sleep(60)"
)


def run_script(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(local, "command", lambda *_: [sys.executable, "-S", "-c", script])


def local_workers(
    sizes: tuple[int, ...], is_free: Callable[[str, int], bool] = lambda *_: True
) -> LocalWorkers:
    return LocalWorkers(Config(local=sizes), "tcp://127.0.0.1:1", is_free, min_pause_s=0.01)


def test_a_local_worker_is_told_the_routers_settings() -> None:
    config = Config(
        model="/m/x", executor="hash", local=(1, 1), worker_args="--num-blocks 64 --threads=1"
    )
    [python, dash_m, module, *argv] = command(config, "tcp://127.0.0.1:9", "decode", 3)
    assert (python, dash_m, module) == (sys.executable, "-m", "worker")
    settings = parse(WorkerConfig, argv)
    assert (settings.role, settings.rank, settings.router) == ("decode", 3, ("tcp://127.0.0.1:9",))
    assert (settings.model, settings.executor, settings.num_blocks) == ("/m/x", "hash", 64)
    assert settings.max_kv_transfer_bytes == config.max_kv_transfer_bytes


@pytest.mark.parametrize(
    ("local", "share"), [((1, 0), 0.8), ((1, 1), 0.4), ((1, 3), 0.2), ((4,), 0.2)]
)
def test_local_workers_divide_the_gpu(local: tuple[int, ...], share: float) -> None:
    config = Config(local=local, memory_share=0.8)
    settings = parse(WorkerConfig, command(config, "tcp://127.0.0.1:9", "prefill", 0)[3:])
    assert settings.memory_share == pytest.approx(share)


def test_a_local_worker_does_not_inherit_the_routers_own_settings() -> None:
    ours = {"BATON_HTTP": "x", "BATON_MODEL": "y", "BATON_BLOCK_SIZE": "32"}
    assert environment(ours) == {"BATON_BLOCK_SIZE": "32"}


def test_a_local_worker_is_told_its_cores_unless_somebody_says_others() -> None:
    cores = frozenset({0, 1, 2, 8})
    assert environment({}, cores)["BATON_CORES"] == "0-2,8"
    assert environment({"BATON_CORES": "7"}, cores)["BATON_CORES"] == "7"
    assert "BATON_CORES" not in environment({})


@pytest.mark.parametrize(
    ("cores", "quota", "sharing", "planned"),
    [
        (2, inf, "auto", {}),
        (2, inf, "split", {"decode": "0", "prefill": "1"}),
        (8, inf, "auto", {"decode": "0-3", "prefill": "4-7"}),
        (8, inf, "shared", {}),
        (8, 3.5, "auto", {}),
        (0, inf, "auto", {}),
    ],
)
def test_only_those_that_may_not_use_every_core_are_told_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float, sharing: Any, planned: dict[str, str]
) -> None:
    monkeypatch.setattr(local, "own_cores", lambda: frozenset(range(cores)))
    monkeypatch.setattr(local, "physical_cores", lambda node: [frozenset({it}) for it in node])
    monkeypatch.setattr(local, "nodes", lambda cores: [cores])
    monkeypatch.setattr(local, "quota", lambda: quota)
    found = cores_of_workers(Config(local=(1, 1), local_cores=sharing))
    assert planned == {role: format_cores(place) for (role, _), place in found.items()}


async def test_one_number_starts_workers_that_do_both(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, OBEDIENT)
    workers = LocalWorkers(parse(Config, ["--local", "2"]), "tcp://127.0.0.1:1", lambda *_: True)
    workers.start()
    await until(lambda: len(workers.pids) == 2)
    assert workers.pids.keys() == {("any", 0), ("any", 1)}
    await workers.stop(20.0)


async def test_a_worker_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, OBEDIENT)
    workers = local_workers((0, 1))
    workers.start()
    await until(lambda: workers.pids)
    first = workers.pids["decode", 0]
    os.kill(first, signal.SIGKILL)
    await until(lambda: workers.pids.get(("decode", 0), first) != first)
    await workers.stop(20.0)


async def test_a_worker_with_wrong_settings_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries = tmp_path / "tries"
    run_script(monkeypatch, f"open({str(tries)!r}, 'a').write('x'); raise SystemExit(78)")
    workers, others = local_workers((1, 0)), asyncio.all_tasks()
    workers.start()
    await until(lambda: asyncio.all_tasks() == others)  # nobody looks after it any more
    assert tries.read_text() == "x"
    await workers.stop(1.0)


async def test_a_worker_that_ran_before_is_tried_until_its_model_is_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, runs = tmp_path / "model", tmp_path / "runs"
    model.touch()
    run_script(
        monkeypatch,
        "import os, time\n"
        f"if not os.path.exists({str(model)!r}): raise SystemExit(78)\n"
        f"open({str(runs)!r}, 'a').write('x')\n"
        "time.sleep(60)",
    )
    workers = local_workers((0, 1))
    workers.start()
    await until(lambda: runs.exists() and runs.read_text() == "x")  # it is written, not only opened
    model.unlink()
    with capture_logs() as logs:
        os.kill(workers.pids["decode", 0], signal.SIGKILL)
        await until(lambda: [line.get("status") for line in logs].count(78) >= 3)
        workers.check([NOBODY])  # it is not given up
    said = [line for line in logs if line["log_level"] == "error"]
    assert len(said) >= 3 and {line["worker"] for line in said} == {"decode-0"}
    assert "tried again" in said[0]["event"]
    pauses = [line["restart_in_s"] for line in logs if "restart_in_s" in line]
    assert pauses == sorted(set(pauses)), "each is longer than the one before"
    model.touch()
    await until(lambda: runs.read_text() == "xx")
    await workers.stop(20.0)


NOBODY: Final = ProcessState(pid=1, running=0, waiting=0, reasons=[], workers=[])
SOMEBODY: Final = structs.replace(NOBODY, workers=[{"role": "decode", "rank": 9}])


async def test_the_settings_cannot_work_if_all_are_given_up_and_nobody_else_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripts = {"prefill": SILENT, "decode": "raise SystemExit(78)"}
    run = [sys.executable, "-S", "-c"]
    monkeypatch.setattr(local, "command", lambda _, bus, role, rank: [*run, scripts[role]])
    workers, others = local_workers((1, 1)), asyncio.all_tasks()
    workers.start()
    await until(lambda: workers.pids.keys() == {("prefill", 0)})
    await until(lambda: len(asyncio.all_tasks() - others) == 1)
    workers.check([NOBODY])  # the prefill worker may still come
    await workers.stop(1.0)
    workers.check([NOBODY])  # and now it is we who end

    workers = local_workers((0, 2))
    workers.check([NOBODY])
    workers.start()
    await until(lambda: asyncio.all_tasks() == others)
    workers.check([NOBODY, SOMEBODY])
    with pytest.raises(ConfigError, match="--worker-args"):
        workers.check([NOBODY, NOBODY])
    await workers.stop(1.0)


async def test_a_worker_that_was_asked_to_leave_stays_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries = tmp_path / "tries"
    run_script(monkeypatch, f"open({str(tries)!r}, 'a').write('x'); raise SystemExit({EX_LEFT})")
    workers, others = local_workers((0, 1)), asyncio.all_tasks()
    workers.start()
    await until(lambda: asyncio.all_tasks() == others)
    assert tries.read_text() == "x"
    workers.check([NOBODY])  # the settings were right: others may come
    await workers.stop(1.0)


async def test_a_worker_whose_rank_is_taken_is_started_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries, asked, others = tmp_path / "tries", list[tuple[str, int]](), {("decode", 0)}

    def place_is_free(role: str, rank: int) -> bool:
        asked.append((role, rank))
        return (role, rank) not in others

    run_script(monkeypatch, f"open({str(tries)!r}, 'a').write('x'); raise SystemExit(75)")
    workers = local_workers((0, 1), place_is_free)
    workers.start()
    await until(lambda: len(asked) > 3)
    assert tries.read_text() == "x" and set(asked) == {("decode", 0)}
    run_script(monkeypatch, OBEDIENT)
    others.clear()
    await until(lambda: workers.pids)
    await workers.stop(20.0)


async def test_a_worker_that_will_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_up = tmp_path / "up"
    run_script(monkeypatch, STUBBORN.format(path=str(is_up)))
    workers = local_workers((1, 0))
    workers.start()
    await until(is_up.exists)
    [pid] = workers.pids.values()
    await workers.stop(0.05)
    assert is_gone(pid)
