"""Every script that can be run finds what it imports, wherever it is run from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
RUNNABLE = [path for path in sorted(SCRIPTS.glob("*.py")) if "__main__" in path.read_text()]
# Everything but the last lines: not every script takes --help.
LOAD = "import runpy, sys; runpy.run_path(sys.argv[1])"


@pytest.mark.parametrize("script", RUNNABLE, ids=lambda path: path.name)
def test_it_finds_its_imports_from_any_directory(script: Path, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", LOAD, str(script)]
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
