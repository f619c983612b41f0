"""Runs scripts/keys."""

from __future__ import annotations

import subprocess
import sys

from tests.cluster import ROOT


def keys(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "keys.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
