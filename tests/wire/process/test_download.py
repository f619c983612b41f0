"""A download from the hub says how far it is: the real client, and a hub of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cluster import ROOT
from tests.wire.process.hub import hub

PROGRAM = """
import wire.process.log_limit as log_limit
log_limit.PROGRESS_S = 0.0
from wire.process.log import configure
from wire.process.model import locate
configure()
print(locate("org/name"))
"""


def test_a_download_logs_bytes_and_draws_no_bar(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": bytes(30 << 20)}
    with hub(files) as url:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").stat().st_size == 30 << 20
    events = [json.loads(line) for line in done.stderr.splitlines()]  # and nothing but lines
    progress = [each for each in events if each["event"] == "downloading"]
    assert progress and all(each["model"] == "org/name" for each in progress)
    shares = [each["done"] for each in progress]
    assert shares == sorted(shares) and shares[-1] < progress[-1]["of"] == (30 << 20) + 2
