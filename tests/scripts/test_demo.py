"""The demo says what it is when it is asked, and does not begin."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster import ROOT

DEMO = [sys.executable, str(ROOT / "scripts/demo.py")]


def test_nothing_is_installed_to_show_the_usage(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    demo = shutil.copy(ROOT / "scripts/demo", tmp_path / "scripts")  # and nothing to install it
    shown = subprocess.run([demo, "--help"], capture_output=True, text=True, timeout=30)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "usage: scripts/demo" in shown.stdout
