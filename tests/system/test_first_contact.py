"""A start that cannot work ends with 78 and one line; any other says why it waits."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import ROOT, START_S, until
from wire.process.model import DEMO

PORTS = ("--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0")


def damaged(directory: Path, name: str, change: Callable[[bytes], bytes | None]) -> Path:
    """A copy of the demo model, one file of it changed or, for None, taken away."""
    model = Path(shutil.copytree(DEMO, directory / "model"))
    content = change((model / name).read_bytes())
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    return model


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


# File, what happens to it, and what the line says; the others only workers read.
OF_ROUTERS: list[tuple[str, Callable[[bytes], bytes | None], str]] = [
    ("config.json", half, r"config\.json.*is the file whole"),
    ("tokenizer.json", lambda _: b"{}", r"tokenizer\.json"),
    ("tokenizer_config.json", lambda _: b'{"chat_template": "{% if"}', "chat template"),
]
OF_WORKERS: list[tuple[str, Callable[[bytes], bytes | None], str]] = [
    ("config.json", lambda c: c.replace(b'"llama"', b'"gpt2"'), "model_type is 'gpt2', not one of"),
    ("model.safetensors", half, "is the file whole"),
]


def ends_with_78_and_one_line(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 78, done.stderr
    lines = [line for line in done.stderr.splitlines() if '"event": "loading"' not in line]
    assert len(lines) == 1 and "Traceback" not in lines[0] and "exc_type" not in lines[0], lines
    return lines[0]


@pytest.mark.parametrize(("name", "change", "words"), OF_ROUTERS + OF_WORKERS)
def test_a_model_that_cannot_be_served_is_one_line(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes | None], words: str
) -> None:
    model, bus = str(damaged(tmp_path, name, change)), f"ipc://{tmp_path}/bus"
    router: tuple[str, ...] = ("router", "--model", model, "--bus", bus, *PORTS)
    if (name, change, words) in OF_WORKERS:
        router += ("--local", "1,1")
        worker = ("worker", "--model", model, "--role", "decode", "--rank", "0", "--router", bus)
        assert re.search(words, ends_with_78_and_one_line(*worker))
    assert re.search(words, ends_with_78_and_one_line(*router))


def test_local_explains_itself() -> None:
    line = ends_with_78_and_one_line("router", "--local=1,65")
    assert "P,D" in line and "--local 1,1" in line and "'1,65'" in line


def test_a_router_whose_workers_cannot_start_ends_like_them(tmp_path: Path) -> None:
    """Under python -P nobody imports from the working directory: the workers are the real ones."""
    for name in ("router.py", "worker.py"):
        (tmp_path / name).write_text("raise SystemExit(f'{__file__} was run')")
    command = ["router", "--local", "1,1", "--worker-args", "--num-bloks 4", *PORTS]
    command += ["--bus", "tcp://127.0.0.1:0", "--processes", "2"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 78 and str(tmp_path) not in done.stderr, done.stderr
    assert done.stderr.count("--num-bloks is not a flag; did you mean --num-blocks?") == 2
    assert "Traceback" not in done.stderr and "exc_type" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("--local: none of these workers can start") and "--worker-args" in last


@contextmanager
def running(log: Path, *command: str) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """A process, and what its log says so far."""
    with log.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stderr=stderr)

    def lines() -> list[dict[str, Any]]:
        whole = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]
        return [json.loads(line) for line in whole]

    try:
        yield lines
    finally:
        process.terminate()
        assert process.wait(START_S) == 0


def test_a_worker_that_reaches_no_router_says_which(tmp_path: Path) -> None:
    bus = f"ipc://{tmp_path}/nobody"
    command = ("worker", "--executor", "hash", "--role", "decode", "--rank", "0", "--router", bus)
    with running(tmp_path / "log", *command) as lines:

        def complaints() -> list[dict[str, Any]]:
            return [line for line in lines() if line["event"] == "cannot reach the router"]

        until(lambda: len(complaints()) >= 2, "it says so again")
        assert {line["router"] for line in complaints()} == {bus}
        assert "--router" in complaints()[0]["hint"]


def test_a_router_says_what_it_waits_for_and_then_what_to_try(tmp_path: Path) -> None:
    ready, bus = tmp_path / "ready.json", f"ipc://{tmp_path}/bus"
    router = (
        *("router", "--executor", "hash", "--bus", bus, *PORTS, "--ready-file", str(ready)),
        *("--heartbeat-ms", "60000"),  # no worker is missed for a while, and then there again
    )
    worker = ("worker", "--executor", "hash", "--role", "decode", "--rank", "0", "--router", bus)
    with running(tmp_path / "router", *router) as lines:

        def events(begin: str) -> list[dict[str, Any]]:
            return [line for line in lines() if line["event"].startswith(begin)]

        waits, *_ = until(lambda: events("waiting for workers"), "it says that it waits")
        assert waits["reasons"] == ["no worker that can decode is ready"]  # which can prefill too
        http = json.loads(ready.read_text())["http"]
        assert httpx.get(http + "/readyz", trust_env=False, timeout=60).status_code == 503
        with running(tmp_path / "decode", *worker):
            is_ready, *_ = until(lambda: events("ready; try "), "it says that it is ready")
            words = shlex.split(is_ready["event"].removeprefix("ready; try "))
            assert words[:2] == ["curl", f"{http}/v1/completions"] and words[2::2] == ["-H", "-d"]
            headers = dict([words[3].split(": ")])
            answer = httpx.post(
                words[1], headers=headers, content=words[5], trust_env=False, timeout=60
            )
            # Sampled without a seed: it may be no text at all.
            assert answer.json()["choices"][0]["finish_reason"] in ("length", "stop")
