#!/usr/bin/env python3
"""How long one body stops the router: the longest wait of those who ask something small meanwhile.

    scripts/bench_loop_stall.py                          # 32,768 tokens of context
    scripts/bench_loop_stall.py --max-model-len 500000   # a text of 2 MB is tokenized

Starts a router with hash workers.  A process of its own asks `/livez` again and again over a kept
connection, while bodies of 1 to 16 MB are posted, two of each at a time.  Its slowest answer is
the stall, of several rounds the least: others on the machine only add to it, and the row without a
body says how much they do.  RSS is the router's, after the row.
`--root` measures another checkout.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent
START_S: Final = 120.0
TIMEOUT_S: Final = 120.0
NUM_AT_A_TIME: Final = 2
MB: Final = 1 << 20
HEADERS: Final = {"content-type": "application/json"}


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Name, path and content of everything that is posted."""
    words = "the quick brown fox jumps over the lazy dog and "
    for size in (1, 2, 4, 16):
        # A little less, so that the whole body has this size.
        text = (words * (size * MB // len(words)))[: size * MB - 100]
        for name, prompt in (("words", text), ("one letter", "a" * len(text))):
            body = {"prompt": prompt, "max_tokens": 1}
            yield f"{size} MB of {name}", "/v1/completions", json.dumps(body).encode()
    message = {"role": "user", "content": "Hello"}
    for number in (5_000, 100_000):
        chat = {"messages": [message] * number, "max_tokens": 1}
        yield f"{number:,} messages", "/v1/chat/completions", json.dumps(chat).encode()
    for number in (200_000, 2_000_000):
        ids = {"prompt": [7] * number, "max_tokens": 1}
        yield f"{number:,} ids", "/v1/completions", json.dumps(ids, separators=(",", ":")).encode()
    empty = b'{"prompt":"a","tools":[' + b",".join([b"[]"] * 1_300_000) + b"]}"
    yield "1,300,000 empty lists", "/v1/chat/completions", empty


@contextmanager
def router(root: Path, max_model_len: int | None) -> Iterator[tuple[int, psutil.Process]]:
    """A router with a prefill and a decode worker; its port and process."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready"
        flags = ["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--bus", "tcp://127.0.0.1:0"]
        flags += ["--local", "1,1", "--executor", "hash", "--log-level", "error"]
        if max_model_len is not None:
            flags += ["--worker-args", f"--max-model-len {max_model_len}"]
        command = [sys.executable, "-m", "router", *flags]
        process = subprocess.Popen([*command, "--ready-file", str(ready)], cwd=root)
        try:
            _until(ready.exists, "the router listens")
            port = int(json.loads(ready.read_text())["http"].rpartition(":")[2])
            _until(lambda: _ask(port, "GET", "/readyz") == 200, "its workers are there")
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {START_S} s: {what}")
        time.sleep(0.05)


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> int:
    """Ask, read the whole answer, and return its status; 0: there was none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, HEADERS if body else {})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
    return response.status


def poll(port: int, is_over: Event, answer: Any) -> None:
    """Ask `/livez` until it is over; send the longest time that took."""
    request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    slowest = 0.0
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        answer.send(None)  # it has begun
        while not is_over.is_set():
            sent = time.monotonic()
            connection.sendall(request)
            said = b""
            while not said.endswith(b"}"):
                if not (more := connection.recv(4096)):
                    raise RuntimeError("the router hung up on /livez")
                said += more
            slowest = max(slowest, time.monotonic() - sent)
            time.sleep(0.001)
    answer.send(slowest)


def measure(port: int, path: str, body: bytes | None) -> tuple[list[int], float, float]:
    """Statuses, seconds until the last answer, and the longest wait of somebody else meanwhile."""
    context = multiprocessing.get_context("spawn")
    is_over = context.Event()
    here, there = context.Pipe()
    poller = context.Process(target=poll, args=(port, is_over, there))
    poller.start()
    there.close()  # else nobody would notice that the process has ended
    here.recv()
    begin = time.monotonic()
    if body is None:
        time.sleep(2.0)
        statuses = []
    else:
        with ThreadPoolExecutor(NUM_AT_A_TIME) as threads:
            asks = [threads.submit(_ask, port, "POST", path, body) for _ in range(NUM_AT_A_TIME)]
            statuses = [ask.result() for ask in asks]
    seconds = time.monotonic() - begin
    time.sleep(0.05)  # what is freed after the answer counts as well
    is_over.set()
    stall = here.recv()
    poller.join()
    return statuses, seconds, stall


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what large bodies cost the others.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to run")
    parser.add_argument("--max-model-len", type=int, help="context length; none: the hash worker's")
    parser.add_argument("--rounds", type=int, default=3, help="of each body")
    args = parser.parse_args()
    row = "{:<24} {:>10} {:>10} {:>10} {:>9}"
    print(row.format("body", "status", "answer s", "stall ms", "RSS MB"))
    with router(args.root.resolve(), args.max_model_len) as (port, process):
        for name, path, body in [("(none)", "", None), *bodies()]:
            # A router that stood still has lost its workers, and would refuse the next body for it.
            _until(lambda: _ask(port, "GET", "/readyz") == 200, "the workers are back")
            rounds = [measure(port, path, body) for _ in range(args.rounds)]
            statuses, seconds, stall = min(rounds, key=lambda measured: measured[2])
            rss = process.memory_info().rss / MB
            said = " ".join(str(status or "-") for status in statuses)
            print(
                row.format(name, said, f"{seconds:.2f}", f"{1000 * stall:.0f}", f"{rss:.0f}"),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
