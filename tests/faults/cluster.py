"""A cluster made to be hurt: every process can be killed, frozen and cut off, and comes back.

The router and each worker are processes of their own.  Workers reach the router, and prefill
workers reach decode workers, through relays (`tests.faults.relay`).  Whoever dies is started
again at once, as systemd would, until `rest` says not to.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.cluster import START_S, Cluster, until
from tests.faults.ports import free_port
from tests.faults.relay import Relay, Relays

Key = tuple[str, int]  # role and rank
# With short heartbeats workers are missed for having to wait for a core as well as for the fault of
# a test, and each time costs an attempt.
PERSISTENT = ("--max-attempts", "16")


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that one process holds."""

    rss_bytes: int
    num_fds: int
    num_threads: int
    python_blocks: int = 0  # the router's only


class FaultyCluster(Cluster):
    """`prefills` and `decodes` workers behind relays, on the hash executor unless told otherwise.

    `router_args` and `worker_args` are further flags; with `is_supervised` off the dead stay dead.
    """

    def __init__(
        self,
        directory: Path,
        *,
        prefills: int = 2,
        decodes: int = 2,
        executor: str = "hash",
        model: str = "demo",
        router_args: tuple[str, ...] = (),
        worker_args: tuple[str, ...] = (),
        is_supervised: bool = True,
    ) -> None:
        super().__init__(directory, local="", executor=executor, model=model, args=router_args)
        self.keys: list[Key] = [("prefill", rank) for rank in range(prefills)]
        self.keys += [("decode", rank) for rank in range(decodes)]
        self.num_restarts = 0
        self.bus_relays: dict[Key, Relay] = {}
        self.kv_relays: dict[Key, Relay] = {}
        self.workers: dict[Key, subprocess.Popen[bytes]] = {}
        self._kv_ports: dict[Key, int] = {}
        self._worker_args = worker_args
        self._router_index = 0
        self._relays = Relays()
        self._is_supervised = is_supervised
        self._is_resting = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor")

    def __enter__(self) -> Self:
        self._relays.__enter__()
        super().__enter__()  # cleans up after itself
        try:
            self._start_workers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        self._is_resting.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        # Workers first: a router that drains is of no interest here, and a test should be short.
        for process in self.workers.values():
            process.kill()
        super().__exit__(*args)
        self._relays.__exit__()

    @property
    def router(self) -> subprocess.Popen[bytes]:
        return self._processes[self._router_index]

    def kill(self, role: str, rank: int) -> None:
        """SIGKILL; returns when the process is gone."""
        process = self.workers[role, rank]
        process.kill()
        process.wait()

    def freeze(self, role: str, rank: int) -> None:
        self.workers[role, rank].send_signal(signal.SIGSTOP)

    def thaw(self, role: str, rank: int) -> None:
        self.workers[role, rank].send_signal(signal.SIGCONT)

    def kill_router(self) -> None:
        self.router.kill()
        self.router.wait()

    def start_router(self) -> None:
        """Start a router where the last one was."""
        tcp = self.endpoints["tcp"].removeprefix("tcp://")
        self._router_index = len(self._processes)
        self._spawn(
            *("router", "--http", self.http.removeprefix("http://"), "--tcp", tcp),
            *("--bus", self.bus, "--model", self._model, "--executor", self._executor),
            *self._args,
        )

    def is_whole(self) -> bool:
        """Whether every worker is ready, as the router sees it."""
        rows = {(row["role"], row["rank"]): row["state"] for row in self.status()["workers"]}
        return all(rows.get(key) == "ready" for key in self.keys)

    def until_whole(self, timeout_s: float = START_S) -> None:
        until(self.is_whole, "every worker is ready", timeout_s)

    def rows(self) -> dict[Key, dict[str, Any]]:
        """Rows of /v1/cluster by role and rank."""
        return {(row["role"], row["rank"]): row for row in self.status()["workers"]}

    def usage(self, names: Iterable[str]) -> dict[str, Usage]:
        """The resources that these processes ("router", "decode-0") hold now."""
        pids = {f"{role}-{rank}": self.workers[role, rank].pid for role, rank in self.keys}
        return {
            name: _usage(pids[name])
            if name in pids
            else _usage(self.router.pid, int(metrics(self)["baton_python_blocks"]))
            for name in names
        }

    def _listen_flags(self) -> tuple[str, ...]:
        # `start_router` wants the very same ports again.
        http, tcp, bus = (f"127.0.0.1:{free_port()}" for _ in range(3))
        return ("--http", http, "--tcp", tcp, "--bus", f"tcp://{bus}")

    def _start_workers(self) -> None:
        host, _, port = self.bus.removeprefix("tcp://").rpartition(":")
        for key in self.keys:
            self.bus_relays[key] = self._relays.add(host, int(port))
            if key[0] == "decode":
                self._kv_ports[key] = free_port()
                self.kv_relays[key] = self._relays.add("127.0.0.1", self._kv_ports[key])
            self._start_worker(key)
        self.until_whole()
        if self._is_supervised:
            self._supervisor.start()

    def _start_worker(self, key: Key) -> None:
        role, rank = key
        kv: tuple[str, ...] = ()
        if key in self.kv_relays:
            kv = ("--kv-bind", f"tcp://127.0.0.1:{self._kv_ports[key]}")
            kv += ("--kv-advertise", self.kv_relays[key].endpoint)
        self.workers[key] = self._spawn(
            *("worker", "--role", role, "--rank", str(rank), *kv),
            *("--router", self.bus_relays[key].endpoint, "--model", self._model),
            *("--executor", self._executor, "--threads", "1", *self._worker_args),
        )

    def _supervise(self) -> None:
        while not self._is_resting.wait(0.05):
            for key in self.keys:
                if self.workers[key].poll() is not None and not self._is_resting.is_set():
                    self.num_restarts += 1
                    self._start_worker(key)


def metrics(cluster: Cluster) -> dict[str, float]:
    """The router's own figures without labels, by name."""
    text = httpx.get(cluster.http + "/metrics", trust_env=False, timeout=60).text
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines if "{" not in name}


def _usage(pid: int, python_blocks: int = 0) -> Usage:
    process = psutil.Process(pid)
    with process.oneshot():
        memory = process.memory_info().rss
        held = process.num_fds(), process.num_threads()
    return Usage(memory, *held, python_blocks)


def timed_until_idle(cluster: Cluster) -> float:
    """Seconds until nothing is held anywhere, as heartbeats sent from now on say."""
    start = time.monotonic()
    cluster.until_idle()
    return time.monotonic() - start
