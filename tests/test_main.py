"""`python -m router` and `python -m worker` as they are typed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

INTERRUPTED = """
import runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1] + ".config":  # one of a thousand
            signal.raise_signal(signal.SIGINT)

# A shell that starts us in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("package", ["router", "worker"])
def test_an_interrupt_while_modules_are_imported_is_no_bug(package: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, package]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")
