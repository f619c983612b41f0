"""A terminal shows progress while a cluster starts, and then what to try."""

from __future__ import annotations

import json
from typing import Any

from router.command.progress import Progress

CURL = "curl http://127.0.0.1:8000/v1/completions -d '{}'"


class Screen:
    """A Progress with a clock, given events instead of lines."""

    def __init__(self) -> None:
        self.now = 100.0
        self.progress = Progress(self.now)

    def on(self, event: str, level: str = "info", **fields: Any) -> str:
        line = json.dumps({"event": event, "level": level, "timestamp": "t", **fields})
        return self.progress.on_line(line, self.now)

    @property
    def status(self) -> str:
        return self.progress.status(self.now).partition(": ")[2]


def test_each_worker_is_followed_until_it_has_joined() -> None:
    screen = Screen()
    assert screen.status == "starting the router"
    assert screen.on("downloading", model="o/m", done=3 << 30, of=4 << 30, logger="wire") == ""
    assert screen.status == "downloading o/m, 75 % of 4,096 MiB"
    screen.on("listening", http="http://127.0.0.1:8000", model="m")
    screen.on("waiting for workers", reasons=["no decode worker is ready"])
    for worker in ("decode-0", "prefill-0"):
        screen.on("local worker started", worker=worker, pid=1)
    screen.on("child process ended", "warning", worker="decode-0", status=1)
    assert screen.status == "decode-0 ended, is restarted; prefill-0 starting"
    screen.on("local worker started", worker="decode-0", pid=2)
    assert screen.status == "decode-0, prefill-0 starting"
    screen.on("loading weights", worker="decode-0", done=30, of=120)
    screen.on("warming up", worker="prefill-0")
    assert screen.status == "decode-0 loading weights, 25 %; prefill-0 compiling and warming up"
    screen.on("worker joined", worker="decode-0", epoch=1, blocks=9)
    assert screen.status == "prefill-0 compiling and warming up"
    screen.now += 12.4
    assert screen.progress.status(screen.now).endswith("12 s: prefill-0 compiling and warming up")
    screen.on("worker joined", worker="prefill-0", epoch=1, blocks=9)
    assert screen.status == "prefill-0 has joined"
    said = screen.on(f"ready; try {CURL}").splitlines()
    assert said[0] == "Ready after 12 s: m at http://127.0.0.1:8000"
    assert [line.strip() for line in said[1:]] == [
        "talk:  baton chat",
        "watch: http://127.0.0.1:8000/",
        f"call:  {CURL}",
    ]
    assert screen.status == ""
    assert screen.on(f"ready; try {CURL}") == "Ready again."


def test_what_to_try_has_the_address_and_the_key() -> None:
    screen = Screen()
    screen.on("listening", http="https://box:9", model="m")
    said = screen.on("ready; try curl -H 'authorization: Bearer '$BATON_API_KEY")
    assert "baton chat --url https://box:9 --api-key-file FILE\n" in said


def test_warnings_errors_and_what_is_no_event_are_shown() -> None:
    screen = Screen()
    said = screen.on("worker lost", "warning", worker="decode-0", reason="gone", logger="router")
    assert said == "warning: worker lost worker=decode-0 reason=gone"
    said = screen.on("the process failed", "error", exception="Traceback ...\nKeyError")
    assert said == "error: the process failed\nTraceback ...\nKeyError"
    for line in ("Fatal Python error", "[1]", "3", '{"event": "x"}', "{"):
        assert screen.progress.on_line(line, screen.now) == line
    assert screen.on("placed", "debug") == ""


def test_stopping_is_said() -> None:
    screen = Screen()
    screen.on(f"ready; try {CURL}")
    screen.progress.is_stopping = True
    assert screen.progress.status(screen.now).startswith("Stopping")
