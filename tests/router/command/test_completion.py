"""Completion offers commands, flags and values, in real shells where there are any."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from router.command.completion import SCRIPTS, candidates, complete, run
from router.command.main import by_name
from tests.cluster import ROOT


def test_commands_flags_and_values_are_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(by_name()) < set(candidates([], ""))
    assert {"--http", "--no-insecure", "--help"} < set(candidates(["serve"], "--"))
    assert "--rank" in candidates(["worker"], "-") and "--http" not in candidates(["worker"], "-")
    assert "--rank" in candidates(["config", "worker"], "-")
    assert candidates(["config"], "") == ["router", "worker", "--json"]
    assert candidates(["router", "--device"], "") == ["auto", "cpu", "cuda"]
    assert candidates(["router", "--model"], "") == candidates(["none"], "-") == []
    assert candidates(["completion"], "") == ["bash", "zsh", "fish"]
    complete(["chat", "--max"])
    assert capsys.readouterr().out == "--max-tokens\n"


@pytest.mark.parametrize("name", sorted(by_name().keys() - {"completion"}))
def test_flags_of_every_command_are_offered(name: str) -> None:
    found = candidates([name], "-")
    assert "--help" in found and not [flag for flag in found if flag.endswith("-")]


BASH = """
{script}
COMP_WORDS=(baton {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _baton
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ }}; compadd() {{ shift; print -l -- "${{(@P)1}}" }}; _files() {{ }}
{script}
words=(baton {words}); CURRENT=$#words; _baton
"""
FISH = "{script}\ncomplete -C 'baton {words}' | string split -f1 \\t"


@pytest.mark.parametrize(("shell", "program"), [("bash", BASH), ("zsh", ZSH), ("fish", FISH)])
def test_shells_complete(
    shell: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    assert run([shell]) == 0
    script = capsys.readouterr().out
    assert script == SCRIPTS[shell]
    (baton := tmp_path / "baton").write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m router.command "$@"\n'
    )
    baton.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for words, expected in (("wor", "worker"), ("router --device cu", "cuda")):
        text = program.format(script=script, words=words)
        done = subprocess.run([shell, "-c", text], env=environ, capture_output=True, text=True)
        assert done.stderr == "" and done.stdout.split() == [expected]
