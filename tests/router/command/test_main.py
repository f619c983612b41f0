"""The command `baton` finds its commands, and says so if there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from router.command.main import GROUPS, main, usage


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    assert capsys.readouterr().out == 2 * usage()
    for group in GROUPS.values():
        for command in group:
            assert f"  {command.name} " in usage()


def test_an_unknown_command_is_answered_with_a_close_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["routr"]) == 2
    assert "did you mean router?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["router", "worker"])
def test_router_and_worker_are_the_modules(name: str) -> None:
    program = f"import sys; from router.command.main import main; sys.exit(main(['{name}', '-h']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and f"python -m {name}" in done.stdout
