"""Runs `baton keys`."""

from __future__ import annotations

import subprocess
import sys

from tests.cluster import ROOT, START_S

BATON_KEYS = (sys.executable, "-m", "router.command", "keys")


def keys(*args: object) -> subprocess.CompletedProcess[str]:
    command = [*BATON_KEYS, *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False
    )
