"""The bench of transfers checks what it moves: its short form, without figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent.parent / "scripts" / "bench_kv.py"


WAYS = ("tcp", "ipc+keys")


def test_all_kv_arrives_as_it_was() -> None:
    command = [sys.executable, str(BENCH), "--short", "--ways", *WAYS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=110)
    said = "".join(f"{way}: all KV arrived as it was\n" for way in WAYS)
    assert (done.returncode, done.stdout) == (0, said)
