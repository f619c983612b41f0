"""A router process before it serves: what its collector leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from router.config import Config
from router.start import has_own_weights, start
from wire.process.settings import EX_CONFIG

TOLD = """
import gc, json, sys
from router.__main__ import main

status = main(["--model", "/nowhere", "--log-level", "error"])
print(json.dumps([status, gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())]))
"""


def test_imported_objects_are_frozen() -> None:
    said = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, check=True, timeout=60)
    status, is_enabled, num_frozen, num_watched = json.loads(said.stdout.splitlines()[-1])
    assert status == EX_CONFIG and is_enabled
    assert num_frozen > 10 * num_watched


@pytest.mark.parametrize(
    ("settings", "has_them"),
    [
        ({"local": (1, 1)}, True),
        ({"local": (0, 1)}, True),
        ({}, False),
        ({"local": (1, 1), "executor": "hash"}, False),
        ({"local": (1, 1), "worker_args": "--executor mine:create"}, False),
        ({"local": (1, 1), "worker_args": "--num-blocks 9"}, True),
    ],
)
def test_weights_are_looked_at_for_local_workers_of_ours(
    settings: dict[str, object], has_them: bool
) -> None:
    """Others may be on another machine, or need none: a user's own executor, hash."""
    assert has_own_weights(Config(**settings)) == has_them  # type: ignore[arg-type]


@pytest.mark.parametrize("num", [1, 2])
def test_several_processes_are_started_with_the_arguments_of_this_one(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, argv = list[tuple[object, ...]](), ["--model", "demo", "--processes", str(num)]

    def several(config: Config, argv: list[str], stop: object) -> None:
        started.append((config.processes, argv))

    monkeypatch.setattr("router.start.configure", lambda level: None)
    monkeypatch.setattr("router.start.run", lambda begin: begin(None))
    monkeypatch.setattr("router.start.serve_alone", lambda *_: started.append((1, argv)))
    monkeypatch.setattr("router.start.serve_by_several", several)
    start(argv)
    assert started == [(num, argv)]
