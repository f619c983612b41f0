"""What the README shows works as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.cluster import ROOT, Cluster

README = (ROOT / "README.md").read_text()


def test_the_raw_tcp_client_works(tmp_path: Path, cluster: Cluster) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert source.count("\n") < 40
    client = tmp_path / "client.py"
    client.write_text(source)
    host, port = cluster.tcp
    question = "Tell me a story about Mia and a lantern."
    command = [sys.executable, str(client), cluster.http, host, str(port), question]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 20


def test_every_path_it_names_is_there() -> None:
    for path in re.findall(r"`((?:wire|router|worker|kernels|tests|scripts)/[\w./]*)`", README):
        assert (ROOT / path).exists(), path
