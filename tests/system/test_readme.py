"""What the README shows works as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.cluster import ROOT, Cluster

README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(mark: str) -> str:
    """The one Python block of the README in which this is said."""
    (source,) = [source for source in PYTHON if mark in source]
    assert isinstance(source, str)
    return source


def test_the_raw_tcp_client_works(tmp_path: Path, cluster: Cluster) -> None:
    source = block("import socket")
    assert source.count("\n") < 40
    client = tmp_path / "client.py"
    client.write_text(source)
    host, port = cluster.tcp
    question = "Tell me a story about Mia and a lantern."
    command = [sys.executable, str(client), cluster.http, host, str(port), question]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 20


def test_the_examples_it_shows_are_the_files_that_are_tested() -> None:
    for mark, name in (("def prefill(", "own_model"), ("import socket", "client")):
        _, example = (ROOT / "scripts" / "examples" / f"{name}.py").read_text().split('"""\n\n')
        assert block(mark) == example


def test_the_engine_in_a_program_works(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(block("ServingEngine"))
    command = [sys.executable, str(program)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["length (9, 10, 11, 7, 8)", "9 10 11 7 8 "]


def test_every_path_it_names_is_there() -> None:
    for path in re.findall(r"`((?:wire|router|worker|kernels|tests|scripts)/[\w./]*)`", README):
        assert (ROOT / path).exists(), path


def test_every_test_it_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", README)
    assert len(named) > 30
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), (path, name)
