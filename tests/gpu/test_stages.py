"""Every part of every stage runs once, through the shim on small inputs, whatever it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.child import run_parts
from tests.gpu.report import verdicts
from tests.gpu.settings import Settings
from tests.gpu.stages import STAGES, Stage
from tests.gpu.targets import Reached
from tests.gpu.trail import Finding, State, Trail
from tests.kernels.shim.backend import why_not

SETTINGS = Settings("shim", seed=3, is_quick=True)
# `test_system.py` runs the parts of that stage.
ALONE = [stage for stage in STAGES if not stage.name.startswith(("bench", "system"))]


@pytest.fixture(autouse=True)
def shim() -> None:
    if reason := why_not():
        pytest.skip(reason)


def findings(stages: list[Stage], tmp_path: Path) -> list[Finding]:
    trail = Trail(tmp_path / "findings.jsonl")
    for stage in stages:
        run_parts(stage.name, stage.parts_of(SETTINGS), trail)
    return trail.findings()


@pytest.mark.parametrize("stage", ALONE, ids=lambda stage: stage.name)
def test_every_part_of_a_stage_runs(stage: Stage, tmp_path: Path) -> None:
    found = findings([stage], tmp_path)
    assert [it.part for it in found] == list(stage.parts_of(SETTINGS))
    state = State.SKIPPED if stage.name == "sanitizer" else State.OK
    assert [it for it in found if it.state is not state] == []


def test_every_part_of_every_benchmark_runs_and_gives_the_figures_of_the_targets(
    tmp_path: Path,
) -> None:
    found = findings([stage for stage in STAGES if stage.name.startswith("bench")], tmp_path)
    assert [it for it in found if it.state is not State.OK] == []
    assert [it.target.name for it in verdicts(found) if it.reached is Reached.UNKNOWN] == []
