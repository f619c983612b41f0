"""Stages go on after parts that raise, kill their process or hang; real processes."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.gpu.parent import run_process, run_stage
from tests.gpu.trail import Finding, State, Trail

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys
from pathlib import Path
if sys.argv[3] == "broken":
    raise SystemExit("cannot start")
from tests.gpu.child import run_parts
from tests.gpu.settings import Unavailable
from tests.gpu.trail import Trail

def good(): return {"figure": 4.5}
def wrong(): raise ValueError("3 of 7 values differ")
def absent(): raise Unavailable("no such tool")
def dies(): os.kill(os.getpid(), signal.SIGKILL)

parts = {"good": good, "wrong": wrong, "absent": absent, "dies": dies, "after": good}
sys.exit(run_parts("stage", parts, Trail(Path(sys.argv[1])), int(sys.argv[2])))
"""


def stage(tmp_path: Path, kind: str, names: list[str]) -> tuple[list[Finding], list[int]]:
    trail, starts = Trail(tmp_path / "findings.jsonl"), list[int]()

    def child(first: int, limit_s: float) -> str:
        starts.append(first)
        command = [sys.executable, "-c", PROGRAM, str(trail.path), str(first), kind]
        return run_process(command, tmp_path / "log", limit_s, ROOT)

    run_stage("stage", names, child, trail, 600.0)
    return trail.findings(), starts


def test_parts_that_fail_or_die_are_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    found, starts = stage(tmp_path, "mixed", ["good", "wrong", "absent", "dies", "after"])
    assert [(it.part, it.state) for it in found] == [
        ("good", State.OK),
        ("wrong", State.FAILED),
        ("absent", State.SKIPPED),
        ("dies", State.LOST),
        ("after", State.OK),
    ]
    assert found[0].figures == {"figure": 4.5} and found[2].problem == "no such tool"
    assert found[1].problem == "ValueError: 3 of 7 values differ"
    assert "status -9" in found[3].problem
    assert starts == [0, 4]  # a second process, for what came after


def test_a_part_that_hangs_is_ended_and_what_is_left_has_no_time(tmp_path: Path) -> None:
    trail, limits = Trail(tmp_path / "findings.jsonl"), list[float]()

    def child(first: int, limit_s: float) -> str:
        limits.append(limit_s)
        trail.add(Finding("stage", "good", State.OK))
        trail.add(Finding("stage", "hangs", State.BEGUN))
        command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
        return run_process(command, tmp_path / "log", 0.1, ROOT)

    now = iter([0.0, 10.0, 39.5])
    run_stage("stage", ["good", "hangs", "late"], child, trail, 40.0, lambda: next(now))
    found = trail.findings()
    assert [(it.part, it.state) for it in found] == [
        ("good", State.OK),
        ("hangs", State.LOST),
        ("late", State.SKIPPED),
    ]
    assert "not done in" in found[1].problem and "no time left" in found[2].problem
    assert limits == [30.0]


def test_a_process_that_cannot_start_is_not_started_for_every_part(tmp_path: Path) -> None:
    found, starts = stage(tmp_path, "broken", ["one", "two", "three"])
    assert [it.state for it in found] == [State.LOST, State.SKIPPED, State.SKIPPED]
    assert "cannot start" in found[0].problem and starts == [0]
