"""`baton serve` shows progress on a terminal, and log lines elsewhere."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.command.serve import run
from tests.cluster import HEARTBEAT, ROOT, until
from tests.router.command.on_terminal import Terminal

ADDRESSES = ("--http=127.0.0.1:0", "--tcp=127.0.0.1:0", "--bus=tcp://127.0.0.1:0")
FREE = (*ADDRESSES, *HEARTBEAT, "--executor=hash")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    flags = ("--log-level", "error", "--ready-file", str(tmp_path / "ready"))
    terminal = Terminal("serve", *FREE, *flags)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_terminal_shows_progress_then_what_to_try(terminal: Terminal, tmp_path: Path) -> None:
    before = terminal.until("Ready after ")
    phases = re.findall(r"any-\d+ (starting|loading|compiling|joining)", before)
    assert "starting the router" in before and "starting" in phases
    assert '"event"' not in before and "\n" not in before  # one line, which was rewritten
    endpoints = json.loads((tmp_path / "ready").read_text())
    assert f" s: demo at {endpoints['http']}" in terminal.until("\r\n")
    terminal.until(f"baton chat --url {endpoints['http']}\r\n")
    terminal.until(f"curl {endpoints['http']}/v1/completions")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("Stopping")
    assert terminal.process.wait(60) == 0


def test_a_wrong_setting_ends_it_with_a_sentence() -> None:
    terminal = Terminal("serve", "--max-waiting", "-1")
    try:
        terminal.until("baton serve: --max-waiting (BATON_MAX_WAITING) = '-1': must be an integer")
        assert terminal.process.wait(60) == 78
    finally:
        terminal.close()


def test_help_is_of_this_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: baton serve [FLAGS]") and "--local P,D|N|auto" in said


def test_a_warning_is_shown_above_the_progress(tmp_path: Path) -> None:
    terminal = Terminal("serve", *FREE, "--model", str(tmp_path / "none"))
    try:
        terminal.until("error: no such model")
        assert terminal.process.wait(60) == 78
    finally:
        terminal.close()


@pytest.mark.parametrize("given", ["flag", "variable", "file", "nowhere"])
def test_local_is_auto_unless_it_is_said(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*FREE]
    if given == "flag":
        flags.append("--local=0,1")
    elif given == "variable":
        monkeypatch.setenv("BATON_LOCAL", "0,1")
    elif given == "file":
        (path := tmp_path / "baton.toml").write_text("local = [0, 1]\n")
        monkeypatch.setenv("BATON_CONFIG", str(path))
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "router.command", "serve", *flags]
        router = subprocess.Popen(command, cwd=ROOT, stderr=log, stdin=subprocess.DEVNULL)
    try:
        found = until(lambda: started(tmp_path / "log"), "a worker")
        assert found == ("any" if given == "nowhere" else "decode")
    finally:
        router.terminate()
        assert router.wait(60) == 0


def started(log: Path) -> str:
    """The role of the first local worker in a log of JSON lines."""
    lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]
    events = map(json.loads, lines)
    names = [each["worker"] for each in events if each["event"] == "local worker started"]
    return names[0].partition("-")[0] if names else ""
