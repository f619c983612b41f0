"""A router process before it serves: what its collector leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys

from wire.aio.settings import EX_CONFIG

TOLD = """
import gc, json, sys
from router.__main__ import main

status = main(["--model", "/nowhere", "--log-level", "error"])
print(json.dumps([status, gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())]))
"""


def test_what_is_imported_is_left_alone_by_the_collector() -> None:
    said = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, check=True, timeout=60)
    status, is_enabled, num_frozen, num_watched = json.loads(said.stdout.splitlines()[-1])
    assert status == EX_CONFIG and is_enabled
    assert num_frozen > 10 * num_watched
