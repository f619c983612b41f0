"""Every script finds what it imports, wherever it is run from, and names itself when misused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
RUNNABLE = [path for path in sorted(SCRIPTS.glob("*.py")) if "__main__" in path.read_text()]
# The commands that hand their arguments to a module: `exec .venv/bin/python -m tests.fuzz "$@"`.
MODULES = {
    path.name: found[1]
    for path in sorted(SCRIPTS.iterdir())
    if path.is_file() and (found := re.search(r'-m (tests\.\w+) "\$@"', path.read_text()))
}
# Everything but the last lines, for not every script takes --help; each in a process of its own,
# forked from one that has imported what takes most of them longest.
LOAD = """
import os, runpy, sys, torch
status = 0
for script in sys.argv[1:]:
    if not os.fork():
        runpy.run_path(script)
        os._exit(0)
    status |= os.wait()[1]
sys.exit(status != 0)
"""


def test_exactly_the_files_with_an_interpreter_are_executable() -> None:
    files = [path for path in SCRIPTS.rglob("*") if path.suffix in ("", ".py") and path.is_file()]
    named = {path for path in files if path.read_bytes().startswith(b"#!")}
    assert named == {path for path in files if os.access(path, os.X_OK)} and len(named) > 20


def test_each_finds_its_imports_from_any_directory(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", LOAD, *map(str, RUNNABLE)]
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("command", MODULES)
def test_a_command_is_called_in_its_usage_as_it_was_typed(command: str) -> None:
    asked = [sys.executable, "-m", MODULES[command], "--help"]
    told = subprocess.run(asked, cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(f"usage: scripts/{command} ")


def test_setup_takes_no_argument_but_dev_and_browser() -> None:
    told = subprocess.run([SCRIPTS / "setup", "--help"], capture_output=True, text=True)
    assert told.returncode == 0 and "usage: scripts/setup [dev | browser]" in told.stdout
    for words in (["devel"], ["dev", "more"]):
        refused = subprocess.run([SCRIPTS / "setup", *words], capture_output=True, text=True)
        assert refused.returncode == 2 and refused.stderr.startswith(
            "usage: scripts/setup [dev | browser]"
        )
