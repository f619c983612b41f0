"""The bench of transfers checks what it moves: its short form, without figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "scripts" / "bench_kv.py"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["tcp", "ipc+keys"])
def test_all_kv_arrives_as_it_was(way: str) -> None:
    command = [sys.executable, str(BENCH), "--short", "--ways", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=110)
    assert (done.returncode, done.stdout) == (0, f"{way}: all KV arrived as it was\n")
