"""`python -m router` and `python -m worker` as they are typed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.cluster import START_S
from wire.process.settings import EX_CONFIG

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
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


@pytest.mark.parametrize("package", ["router", "worker"])
def test_who_has_no_standard_input_gets_one_first_of_all(package: str) -> None:
    """Or else the first socket is number 0."""
    program = (
        "import os\n"
        f"from {package}.__main__ import main\n"
        "status = main(['--model', '/nowhere'])\n"
        "print(status, os.path.samestat(os.fstat(0), os.stat(os.devnull)))\n"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=START_S)
    assert done.stdout.split() == [str(EX_CONFIG), "True"], done.stderr
