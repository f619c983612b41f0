"""Real clusters for tests: a router and its workers as processes of their own, on free ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0  # four workers import torch at once, on two cores
# Twice the default: a process that waits 3 s for a core is not missed, and takes its requests on.
HEARTBEAT = ("--heartbeat-ms", "2000")


def until(condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
    """Poll until `condition()` is truthy; return it.

    Most conditions ask a router, which costs what others wait for: the longer, the less often.
    """
    start = time.monotonic()
    while not (result := condition()):
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            raise TimeoutError(f"not in {timeout_s} s: {what}")
        time.sleep(min(max(0.02, waited_s / 10), 0.1))
    return result


def kv_endpoint(worker: subprocess.Popen[bytes]) -> str:
    """Where a decode worker without a segment port takes KV in: the only port it listens on."""
    import psutil  # here: a bare machine that verifies the GPU has none

    connections = psutil.Process(worker.pid).net_connections("tcp")
    (port,) = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return f"tcp://127.0.0.1:{port}"


class Cluster:
    """`python -m router --local P,D` and any further workers; leaves no process behind."""

    def __init__(
        self,
        directory: Path,
        *,
        local: str = "1,1",
        local_prefill: str = "off",
        model: str = "demo",
        executor: str = "torch",
        args: tuple[str, ...] = (),
        api_key: str = "",
    ) -> None:
        self.headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = "demo" if model == "demo" else Path(model).name
        self._local = local
        self._local_prefill = local_prefill  # "off" makes each request pass through two workers
        self._model = model
        self._executor = executor
        self._args = args
        self._ready_file = directory / "ready.json"
        self.log_path = directory / "cluster.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.endpoints: dict[str, str] = {}
        self.environ: dict[str, str] = {}  # of the processes, beside our own

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            sys.stderr.write(self.log_path.read_text()[-4000:])
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise

    @property
    def http(self) -> str:
        return self.endpoints["http"]

    @property
    def tcp(self) -> tuple[str, int]:
        host, _, port = self.endpoints["tcp"].removeprefix("tcp://").rpartition(":")
        return host, int(port)

    @property
    def bus(self) -> str:
        return self.endpoints["bus"]

    @property
    def router(self) -> subprocess.Popen[bytes]:
        return self._processes[0]

    def worker(self, role: str, rank: int, *args: str) -> subprocess.Popen[bytes]:
        """Start one more worker and wait until the router knows it."""
        process = self._spawn(
            *("worker", "--role", role, "--rank", str(rank), "--router", self.bus),
            *("--model", self._model, "--executor", self._executor, "--threads", "1", *args),
        )
        self.ready(role, rank)
        return process

    def status(self) -> dict[str, Any]:
        """GET /v1/cluster."""
        response = self._client.get(self.http + "/v1/cluster")
        response.raise_for_status()
        return response.json()  # type: ignore[no-any-return]

    def find(self, role: str, rank: int, state: str = "ready") -> dict[str, Any] | None:
        """The worker's row in /v1/cluster, if it is there in this state."""
        for worker in self.status()["workers"]:
            if (worker["role"], worker["rank"], worker["state"]) == (role, rank, state):
                return worker  # type: ignore[no-any-return]
        return None

    def ready(self, role: str, rank: int) -> dict[str, Any]:
        """Wait until the worker is ready and return its row in /v1/cluster.

        On a loaded machine a ready worker's heartbeat may be late, and it is suspect for a moment.
        """
        row = until(lambda: self.find(role, rank), f"{role}-{rank} ready", START_S)
        return row  # type: ignore[no-any-return]

    def until_idle(self, timeout_s: float = 25.0) -> dict[str, Any]:
        """Wait until nothing runs, waits, is held or is in flight anywhere; return the status.

        Only heartbeats that came after the call count.  Nothing may wait for the end of a lease,
        which is 30 s.
        """
        start = time.monotonic()

        def idle_status() -> dict[str, Any] | None:
            asked_at = time.monotonic()
            status = self.status()
            here = [row for row in status["workers"] if row["state"] != "lost"]
            if any(start > asked_at - row["last_seen_s"] for row in here):
                return None
            busy = [status["router"]["running"], status["router"]["waiting"]]
            for worker in here:
                busy += [worker["running"], worker["waiting"], worker["kv_inflight_bytes"]]
                busy.append(worker["blocks"]["used"])
            return None if any(busy) else status

        try:
            return until(idle_status, "idle", timeout_s)  # type: ignore[no-any-return]
        except TimeoutError:
            raise AssertionError(f"not idle: {json.dumps(self.status(), indent=1)}") from None

    def kill_local(self, role: str, rank: int) -> None:
        """SIGKILL a worker that the router started itself."""
        os.kill(self.local_pids(role, rank)[-1], signal.SIGKILL)

    def local_pids(self, role: str, rank: int) -> list[int]:
        """The processes that the router started as this worker, one after another."""
        started = self.events("local worker started")
        return [event["pid"] for event in started if event["worker"] == f"{role}-{rank}"]

    def log(self) -> str:
        return self.log_path.read_text()

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The log so far: all events, or those of these names."""
        lines = [line for line in self.log().splitlines(True) if line.endswith("\n")]
        events = map(json.loads, lines)
        return [event for event in events if not names or event["event"] in names]

    def choices(self, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
        """The choices of a completion."""
        body = {"model": self.model, "prompt": prompt, "return_token_ids": True} | fields
        response = self._client.post(f"{self.http}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"]  # type: ignore[no-any-return]

    def _start(self) -> None:
        self._client = httpx.Client(timeout=START_S, trust_env=False, headers=self.headers)
        local = ("--local", self._local) if self._local else ()
        self._spawn(
            *("router", *self._listen_flags(), *local, "--ready-file", str(self._ready_file)),
            *("--model", self._model, "--executor", self._executor),
            *("--local-prefill", self._local_prefill, *HEARTBEAT, *self._args),
        )
        until(self._is_listening, "router listening", START_S)
        self.endpoints = json.loads(self._ready_file.read_text())
        if self._local and "0" not in self._local.split(","):
            until(self._is_ready, "workers ready", START_S)

    def _listen_flags(self) -> tuple[str, ...]:
        return ("--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--bus", "tcp://127.0.0.1:0")

    def _is_listening(self) -> bool:
        if self.router.poll() is not None:
            raise RuntimeError(f"the router exited with {self.router.returncode}: {self.log()}")
        return self._ready_file.exists() and self._ready_file.stat().st_size > 0

    def _is_ready(self) -> bool:
        counts = [int(count) for count in self._local.split(",")]
        workers = self.status()["workers"]
        return len([w for w in workers if w["state"] == "ready"]) == sum(counts)

    def _spawn(self, *args: str) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *args],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environ,
            )
        self._processes.append(process)
        return process
