"""A worker's process before it serves: threads, the model, the draft model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.examples import own_model
from tests.cluster import START_S
from wire.errors import WireError
from wire.process.cores import best_threads
from wire.process.model import DEMO, ModelError
from wire.process.settings import EX_CONFIG
from worker.config import Config
from worker.start import load, load_draft


@pytest.fixture(autouse=True)
def _keep_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OMP_WAIT_POLICY",
    ):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


LEADER = """
import sys
from worker.__main__ import main
sys.executable = sys.argv.pop()  # with which it starts the other process
sys.exit(main(sys.argv[1:]))
"""


def test_a_follower_with_wrong_settings_ends_the_worker_with_its_status(
    tmp_path: Path,
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexit {EX_CONFIG}\n")
    program.chmod(0o700)
    command = [sys.executable, "-c", LEADER, "--tensor-parallel=2", "--device=cpu", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == EX_CONFIG, done.stderr
    assert "a process of the model is lost" in done.stderr


@pytest.mark.parametrize(
    ("threads", "environ", "expected"),
    [
        (0, {}, (str(best_threads()), "PASSIVE")),
        (0, {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}, ("7", "ACTIVE")),
        (3, {"OMP_NUM_THREADS": "7"}, ("3", "PASSIVE")),
    ],
)
def test_threads_of_torch_are_set_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, threads: int, environ: dict[str, str], expected: object
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    load(Config(executor="hash", threads=threads))
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == expected


PLACED = """
import os, sys
from worker import start as process

def load(config, _):
    loaded(config, None)
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    print(*{core for thread in threads for core in os.sched_getaffinity(thread)})
    print(os.environ["OMP_NUM_THREADS"])
    raise ValueError("that is all")

loaded, process.load = process.load, load
sys.exit(process.start(sys.argv[1:]))
"""
PLACES = pytest.mark.skipif(sys.platform != "linux", reason="processes choose cores on Linux only")


def placed(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PLACED, "--executor", "hash", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)


@PLACES
def test_every_thread_runs_on_the_cores_of_the_flag_and_there_are_as_many() -> None:
    core = max(os.sched_getaffinity(0))
    done = placed("--cores", str(core))
    assert done.stdout.split() == [str(core), "1"], done.stderr
    assert placed("--cores", str(core), "--threads", "3").stdout.split()[-1] == "3"


@PLACES
def test_cores_that_are_not_there_are_refused_with_those_that_are() -> None:
    done = placed("--cores", "0-65535")
    assert done.returncode == 78 and not done.stdout
    assert "--cores 0-65535: this process may run on" in done.stderr


def test_an_executor_with_more_tokens_than_config_json_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, tmp_path)
    config = Config(model=str(tmp_path), executor="scripts.examples.own_model:create")
    load(config)
    monkeypatch.setattr(own_model, "VOCAB", own_model.VOCAB + 1)
    with pytest.raises(ValueError, match=r"own_model:create'.* is 1327, .*config\.json is 1326"):
        load(config)
    (tmp_path / "config.json").write_text("{}")  # does not say
    load(config)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, tmp_path)
    with pytest.raises(ModelError, match="safetensors"):
        load(Config(executor="torch", model=str(tmp_path)))
    load(Config(executor="hash", model=str(tmp_path)))


def test_settings_that_an_executor_lacks_are_refused() -> None:
    load(Config(executor="hash"))
    with pytest.raises(ValueError, match=r"'hash' does not take these settings.*'kv_dtype'"):
        load(Config(executor="hash", kv_dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"'hash' does not take these settings.*'weights'"):
        load(Config(executor="hash", weights="int8"))


def test_a_draft_model_has_its_weights_as_the_large_one() -> None:
    config = Config(executor="torch", device="cpu", weights="int8", speculate="draft:3:demo")
    executor = load(config)
    draft = load_draft(config, executor)
    assert draft is not None
    rounded = executor.capabilities.memory.parameter_bytes
    assert draft.capabilities.memory.parameter_bytes == rounded
    whole = load(Config(executor="torch", device="cpu")).capabilities.memory.parameter_bytes
    assert rounded < 0.55 * whole


@pytest.mark.parametrize("speculate", ["ngram:4", "draft:3:no such model"])
def test_a_draft_model_that_would_be_of_no_use_is_not_loaded(speculate: str) -> None:
    config = Config(executor="scripts.examples.own_model:create", speculate=speculate)
    with pytest.raises(ValueError, match="leave --speculate out"):
        load_draft(config, load(config))


def test_a_draft_model_is_loaded_where_its_guesses_are_verified() -> None:
    executor = load(config := Config(executor="hash"))
    assert load_draft(config, executor) is None
    assert load_draft(Config(executor="hash", speculate="draft:3:demo"), executor) is not None
    with pytest.raises(WireError, match="no such model"):
        load_draft(Config(executor="hash", speculate="draft:3:no such model"), executor)


FROZEN = """
import gc
from worker import start as process

process.run = lambda _: print(gc.get_freeze_count(), len(gc.get_objects())) or 0
process.start(["--executor", "hash"])
"""


def test_loaded_objects_are_frozen() -> None:
    command = [sys.executable, "-c", FROZEN]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=START_S)
    num_frozen, num_watched = map(int, done.stdout.splitlines()[-1].split())
    assert num_frozen > 10 * num_watched


def plugged_in(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run a worker whose executor is what `create` of this source makes; it ends by itself."""
    (directory / "plugin.py").write_text(source)
    paths = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "worker", "--executor", "plugin:create"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


def test_an_interrupt_while_the_model_is_loaded_is_a_line_of_the_log(tmp_path: Path) -> None:
    # A shell that starts us in the background has it ignored.
    source = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def create(**_):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
    )
    done = plugged_in(tmp_path, source)
    assert done.returncode == 128 + signal.SIGINT
    assert "ended by a signal before" in done.stderr and "Traceback" not in done.stderr


TOLD_TO_STOP = """
import atexit, os, signal, time
from worker.executor import hash

class Executor(hash.HashExecutor):
    def forward(self, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3600)

def create(**settings):
    atexit.register(print, "Python ends")
    executor = hash.create(**settings)
    executor.__class__ = Executor
    return executor
"""


def test_a_stop_in_a_step_ends_the_process_at_once(
    tmp_path: Path,
) -> None:
    """Which would take the thread away in the middle of native code."""
    done = plugged_in(tmp_path, TOLD_TO_STOP)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
