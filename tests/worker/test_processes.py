"""The processes of a worker: their start, their rendezvous, and the end of the leader."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from structlog.testing import capture_logs

from scripts.models.make_model import make_model
from tests.cluster import until
from tests.faults.ports import free_port
from wire.process.cores import best_threads
from wire.process.model import fingerprint
from wire.process.settings import EX_CONFIG, SharedSettings, parse
from worker.compute.device_errors import EXIT_DEVICE_FAILED
from worker.config import Config
from worker.parallel.executor import ShardedExecutor
from worker.processes import (
    Followers,
    ProcessInfo,
    command,
    equal_settings,
    follow,
    join_processes,
    process_info,
    set_environment,
)

pytestmark = pytest.mark.timeout(360)  # some start several workers, each with its imports
GPUS, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
INTERFACE = "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29500",
}
AT_A_PORT = "abstract://baton-29500"
EIGHT: dict[str, Any] = {"tensor_parallel": 4, "pipeline_parallel": 2}


@pytest.mark.parametrize(
    ("settings", "environ", "process"),
    [
        ({}, {}, ProcessInfo(0, "", 0, 1)),
        (EIGHT, {}, ProcessInfo(0, "", 0, 8)),
        ({}, TORCHRUN, ProcessInfo(0, "", 0, 1)),  # one of many workers that torchrun has started
        # Of torchrun's own port the next.
        ({**EIGHT, "insecure": True}, TORCHRUN, ProcessInfo(5, "tcp://10.0.0.5:29501", 1, 4)),
        ({**EIGHT, "keys": Path("/k")}, TORCHRUN, ProcessInfo(5, "tcp://10.0.0.5:29501", 1, 4)),
        # Names that anybody may use say nothing without torchrun's own.
        (EIGHT, {"RANK": "5", "WORLD_SIZE": "8"}, ProcessInfo(0, "", 0, 8)),
        (
            {**EIGHT, "rendezvous": "file:///tmp/meet", "process": 6},
            TORCHRUN,  # a flag wins
            ProcessInfo(6, "file:///tmp/meet", 6, 8),
        ),
        (
            {**EIGHT, "rendezvous": "tcp://10.0.0.5:29500", "process": 6, "insecure": True},
            {},
            ProcessInfo(6, "tcp://10.0.0.5:29500", 0, 1),
        ),
        # On one machine no port is opened.
        ({**EIGHT, "rendezvous": "tcp://[::1]:29500"}, {}, ProcessInfo(0, AT_A_PORT, 0, 1)),
    ],
)
def test_each_process_knows_its_place(
    settings: dict[str, Any], environ: Mapping[str, str], process: ProcessInfo
) -> None:
    assert process_info(Config(**settings), environ) == process


def test_torchrun_with_another_number_of_processes_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"8 processes, --tensor-parallel 2 .* 3 are 6; .*--nnodes"
    ):
        process_info(Config(tensor_parallel=2, pipeline_parallel=3), TORCHRUN)


def test_torchrun_on_several_machines_needs_keys_or_insecure() -> None:
    with pytest.raises(ValueError, match=r"no key to tell who may connect: .* --insecure"):
        process_info(Config(**EIGHT), TORCHRUN)
    one_machine = {**TORCHRUN, "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    assert process_info(Config(**EIGHT), one_machine) == ProcessInfo(5, AT_A_PORT, 5, 8)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without the variables that processes settle by; as they were afterwards."""
    for name in (GPUS, THREADS, INTERFACE, "MKL_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def settled() -> dict[str, str]:
    return {name: os.environ[name] for name in (GPUS, THREADS, INTERFACE) if name in os.environ}


@pytest.mark.usefixtures("bare")
def test_nothing_changes_where_there_is_one_process() -> None:
    set_environment(Config(), process_info(Config(), {}))
    assert settled() == {}


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, ["0", "1"]), ("6,2,GPU-7", ["6", "2"]), ("", ["", ""])]
)
def test_each_process_of_a_machine_has_a_gpu_and_its_share_of_the_threads(
    bare: pytest.MonkeyPatch, visible: str | None, gpus: list[str]
) -> None:
    config = Config(tensor_parallel=2)
    for number, gpu in enumerate(gpus):
        for name in (GPUS, THREADS, INTERFACE):
            bare.delenv(name, raising=False)
        if visible is not None:
            bare.setenv(GPUS, visible)
        set_environment(config, ProcessInfo(number, "file:///m", number, 2))
        threads = str(max(1, best_threads() // 2))
        assert settled() == {GPUS: gpu, THREADS: threads, INTERFACE: LOOPBACK}


SAID = {THREADS: "3", INTERFACE: "eth7"}


def test_on_a_cpu_no_gpu_is_chosen_and_what_somebody_says_is_kept(bare: pytest.MonkeyPatch) -> None:
    for name, value in SAID.items():
        bare.setenv(name, value)
    config = Config(tensor_parallel=2, device="cpu", insecure=True)
    set_environment(config, ProcessInfo(1, "tcp://127.1.1.1:29500", 0, 1))
    assert settled() == SAID


@pytest.mark.parametrize(
    "process",
    [
        ProcessInfo(1, "file:///m", 1, 2),
        ProcessInfo(1, AT_A_PORT, 0, 1),
    ],
)
def test_processes_of_one_machine_use_the_loopback(
    bare: pytest.MonkeyPatch, process: ProcessInfo
) -> None:
    for name, value in SAID.items():
        bare.setenv(name, value)
    with capture_logs() as logs:
        set_environment(Config(tensor_parallel=2), process)
    gpu = str(process.local_number)
    assert settled() == {GPUS: gpu, THREADS: "3", INTERFACE: LOOPBACK}
    assert [line[INTERFACE] for line in logs] == ["eth7"]


@pytest.mark.usefixtures("bare")
def test_the_flag_for_threads_is_not_divided() -> None:
    set_environment(Config(tensor_parallel=2, device="cpu", threads=3), ProcessInfo(0, "", 0, 2))
    assert settled() == {THREADS: "3"}
    assert os.environ["MKL_NUM_THREADS"] == "3" and os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_processes_of_several_machines_choose_by_their_number_there_and_where_they_meet(
    bare: pytest.MonkeyPatch,
) -> None:
    bare.setattr("worker.processes.best_threads", lambda: 24)
    set_environment(Config(**EIGHT), ProcessInfo(5, "tcp://127.1.1.1:29501", 1, 4))
    assert settled() == {GPUS: "1", THREADS: "6", INTERFACE: LOOPBACK}


@pytest.mark.usefixtures("bare")
def test_no_interface_is_chosen_without_a_route() -> None:
    set_environment(Config(**EIGHT, threads=1), ProcessInfo(1, "tcp://[ff02::1]:29500", 0, 1))
    assert settled() == {GPUS: "0", THREADS: "1"}


def test_followers_get_the_settings_of_the_model() -> None:
    settings: dict[str, Any] = {
        **EIGHT,
        **{"threads": 2, "cores": "0", "role": "prefill", "rank": 3, "device": "cpu"},
        **{"model": "/m/a b", "dtype": "float32", "kv_dtype": "bfloat16", "weights": "int8"},
        **{"keys": Path("/k"), "log_level": "debug", "drain_s": 1.5, "max_model_len": 77},
    }
    config = Config(**settings)
    [python, dash_m, module, *argv] = command(config, 5, "file:///tmp/meet")
    assert (python, dash_m, module) == (sys.executable, "-m", "worker")
    found = parse(Config, argv)
    assert (found.process, found.rendezvous) == (5, "file:///tmp/meet")
    same = {"dtype", "kv_dtype", "weights", "threads", "tensor_parallel", "pipeline_parallel"}
    same |= set(SharedSettings.model_fields)
    assert found.model_dump(include=same) == config.model_dump(include=same)
    # Process 0 alone is known to routers.
    assert (found.role, found.rank, found.max_model_len) == ("decode", 0, 0)
    parse(Config, command(Config(tensor_parallel=2), 1, "file:///tmp/meet")[3:])


class Lost:
    """Followers that run a shell script instead of Python, and what the leader learns of them."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setenv("OUT", str(tmp_path / "out"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # nothing is left in /tmp
        self.statuses: list[int] = []
        self._others = set(threading.enumerate())

    def start(self, **settings: Any) -> Followers:
        return Followers(Config(**settings), self.statuses.append, os.environ)

    def wait(self) -> list[int]:
        """Wait until somebody has looked after each that ended; return what was told."""
        for watching in set(threading.enumerate()) - self._others:
            watching.join()
        return sorted(self.statuses)


def test_a_follower_is_lost_only_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'case "$*" in *process=1*) exit 0;; *process=2*) exit 78;; *) kill -9 $$;; esac'
    lost = Lost(tmp_path, monkeypatch, script)
    followers = lost.start(tensor_parallel=2, pipeline_parallel=2)
    assert len(followers.pids) == 3
    assert lost.wait() == [-signal.SIGKILL, 78]


def test_followers_have_our_environment_without_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATON_RANK", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "HF_HOME"):
        monkeypatch.setenv(name, "7")
    lost = Lost(tmp_path, monkeypatch, 'env > "$OUT"')
    followers = lost.start(tensor_parallel=2)
    assert lost.wait() == []
    followers.directory.cleanup()
    names = dict(line.partition("=")[::2] for line in (tmp_path / "out").read_text().splitlines())
    assert {"HF_HOME", "PYTHONPATH"} <= names.keys()
    assert not [it for it in names if it.startswith(("BATON_", "NOTIFY_SOCKET", "WATCHDOG_"))]


@pytest.mark.parametrize("status", [0, 3])
def test_the_meeting_directory_is_removed(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Lost(tmp_path, monkeypatch, f"exit {status}")
    followers = lost.start(tensor_parallel=2)
    if status == 0:
        place = Path(followers.rendezvous.removeprefix("file://")).parent
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        followers.directory.cleanup()
    assert lost.wait() == [status] * (status > 0)
    assert not [it for it in tmp_path.iterdir() if it.name.startswith("baton-")]


def test_a_worker_of_one_process_meets_nobody() -> None:
    assert join_processes(Config(), lambda _: None) is None


@pytest.mark.usefixtures("bare")
def test_a_model_that_does_not_divide_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Lost(tmp_path, monkeypatch, 'touch "$OUT"')
    with pytest.raises(ValueError, match="--tensor-parallel may be 1, 2, 4 for this model"):
        join_processes(Config(tensor_parallel=3, device="cpu"), lost.statuses.append)
    assert lost.wait() == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("process", [0, 1])
def test_only_the_leader_watches_processes_that_others_have_started(
    process: int, tmp_path: Path, bare: pytest.MonkeyPatch
) -> None:
    watched, lost = Queue[int](), Queue[int]()

    class Met:
        """The processes after their meeting; each that is watched is lost."""

        is_leader = process == 0

        def __init__(self, *_: object) -> None: ...

        def watch(self, number: int) -> None:
            watched.put(number)
            raise RuntimeError("gone")

    bare.setattr("worker.compute.ranks.Ranks", Met)
    bare.setattr("worker.processes.ending_signals", list)
    path, place = make_model(tmp_path / "model"), f"file://{tmp_path}/meet"
    settings: dict[str, Any] = {"tensor_parallel": 2, "device": "cpu", "process": process}
    join_processes(Config(model=str(path), rendezvous=place, **settings), lost.put)
    if process == 0:
        assert (lost.get(timeout=30), watched.get(timeout=30)) == (1, 1)
    assert watched.empty() and lost.empty()


def test_the_settings_of_numbers_must_be_equal_in_all_processes(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    numbers: dict[str, Any] = {"dtype": "float32", "kv_dtype": "bfloat16", "weights": "int8"}
    config = Config(model=str(path), tensor_parallel=2, **numbers)
    flags = {"--dtype": "float32", "--kv-dtype": "bfloat16", "--weights": "int8"}
    assert equal_settings(config) == {"the fingerprint of --model": fingerprint(path), **flags}


def test_a_key_that_is_missing_on_one_of_several_machines_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    flags = [f"--model={path}", "--tensor-parallel=2", "--device=cpu", f"--keys={tmp_path}"]
    flags += [f"--rendezvous=tcp://127.0.0.2:{free_port()}", "--process=1"]
    command = [sys.executable, "-m", "worker", *flags]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == EX_CONFIG and "Traceback" not in done.stderr
    assert f"cannot read {tmp_path}/decode-0.key" in done.stderr


@pytest.mark.parametrize(("process", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_signal_ends_a_process_that_waits_for_others(
    number: signal.Signals, process: int, tmp_path: Path
) -> None:
    place = tmp_path / "meeting"
    # One for which process 1 can wait: process 0 never answers it.
    silent = socket.socket(socket.AF_UNIX)
    if process == 1:
        silent.bind(str(place))
        silent.listen()
    flags = ["--tensor-parallel=2", "--device=cpu", f"--process={process}"]
    command = [sys.executable, "-m", "worker", *flags, f"--rendezvous=file://{place}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        try:
            if process == 1:
                silent.accept()[0].close()
            until(place.exists, "it waits")
            waiting.send_signal(number)
            _, log = waiting.communicate(timeout=60)
        finally:
            waiting.kill()
            silent.close()
    assert waiting.returncode == 128 + number
    assert "ended by a signal before" in log and "Traceback" not in log


@pytest.mark.parametrize(
    ("error", "status", "event"),
    [
        ("CUDA error: unspecified launch failure\nFor debugging ...", EXIT_DEVICE_FAILED, "GPU"),
        ("Connection closed by peer", 1, "the leader is gone"),
    ],
)
def test_a_follower_whose_gpu_fails_does_not_blame_its_leader(
    error: str, status: int, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr("worker.processes.ending_signals", lambda: [signal.SIGUSR1])
    monkeypatch.setattr(ShardedExecutor, "follow", fail)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with capture_logs() as logs:
            assert follow(ShardedExecutor.__new__(ShardedExecutor)) == status
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, "signals are for the leader"
    finally:
        signal.signal(signal.SIGUSR1, before)
    [line] = logs
    assert event in line["event"] and line["reason"] == error.partition("\n")[0]
