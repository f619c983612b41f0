"""The demo says what it is when it is asked, and does not begin."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster import ROOT

DEMO = [sys.executable, str(ROOT / "scripts/demo.py")]


def test_help_is_all_that_is_printed() -> None:
    shown = subprocess.run([*DEMO, "--help"], capture_output=True, text=True, timeout=30)
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage:") and "Starting" not in shown.stdout


def test_what_it_does_not_know_it_does_not_ignore() -> None:
    refused = subprocess.run([*DEMO, "--fast"], capture_output=True, text=True, timeout=30)
    assert refused.returncode == 2
    assert "--fast" in refused.stderr and refused.stdout == ""


def test_nothing_is_installed_to_show_the_usage(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    demo = shutil.copy(ROOT / "scripts/demo", tmp_path / "scripts")  # and nothing to install it
    shown = subprocess.run([demo, "--help"], capture_output=True, text=True, timeout=30)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "usage: scripts/demo" in shown.stdout
