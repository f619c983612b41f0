"""The demo says what it is when it is asked; and it runs, away from the checkout."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from router.command.demo import answer
from router.command.terminal import Failure
from tests.cluster import ROOT
from tests.router.command.on_terminal import Terminal


def test_nothing_is_installed_to_show_the_usage(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    demo = shutil.copy(ROOT / "scripts/demo", tmp_path / "scripts")  # and nothing to install it
    shown = subprocess.run([demo, "--help"], capture_output=True, text=True, timeout=30)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "usage: scripts/demo" in shown.stdout


def test_it_sends_its_requests_and_leaves_nothing(tmp_path: Path) -> None:
    terminal = Terminal("demo", cwd=tmp_path, environ={"BATON_EXECUTOR": "hash"})
    try:
        before = terminal.until("[HTTP, streaming]", 120)
        assert " s: " in before  # the progress; whose depends on how quickly each worker starts
        said = terminal.until("router exit status 0, 0 processes left.")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    assert said.count("(right: ") == 2
    rows = [line.split()[0] for line in said.splitlines() if "TCP)" in line]
    assert rows == ["question"] * 2


def test_a_connection_that_is_closed_too_early_ends_it() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(Failure, match="closed the connection"):
        answer(ours)
