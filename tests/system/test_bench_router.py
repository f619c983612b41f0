"""The bench of the router in brief: are the tokens right, by HTTP and raw TCP, in all its rows?"""

from __future__ import annotations

import subprocess
import sys

from tests.cluster import ROOT

# Each router is warmed up with "saturated", whose tokens are checked as well.
ROWS = ["memory", "chat-paced", "tcp", "ttft", "one-token"]


def test_every_token_of_the_bench_is_right() -> None:
    command = [sys.executable, "scripts/bench_router.py", "--brief", "--rows", *ROWS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines()[1:]]
    assert [row for row, system in lines if system == "router"] == ROWS
    assert [row for row, system in lines if system != "router"] == ["ttft"], "the bare one beside"
