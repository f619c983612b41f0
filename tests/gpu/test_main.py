"""The script from outside: without a GPU, and on the CPU through the shim."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import __main__ as script
from tests.gpu import record
from tests.gpu.settings import Settings
from tests.gpu.stages import STAGES, Stage
from tests.gpu.trail import Finding, State, Trail
from tests.kernels.shim.backend import why_not

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_with_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--out", str(tmp_path)]) == 3
    out, err = capsys.readouterr()
    assert out == "" and "nothing was checked: no GPU" in err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_meant_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as it:
        script.main(["--only", "verify everything"])
    assert it.value.code == 2 and "verify attention" in capsys.readouterr().err
    arguments = ["--backend", "shim", "--wheels", str(tmp_path), "--out", str(tmp_path)]
    assert script.main(arguments) == 2
    assert f"--wheels {tmp_path} has no wheels" in capsys.readouterr().err


@pytest.mark.full("test_stages.py runs the same parts")
def test_the_shim_runs_the_verification_and_claims_nothing(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    before, out = record.PATH.read_bytes(), tmp_path / "not there yet"
    stages = ("--only", "verify kv", "--only", "sanitizer")
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "--backend", "shim", "--out", str(out), *stages],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT on a GPU, seed " in done.stdout and "or there is no GPU" in done.stdout
    assert (out / "report.txt").read_text() in done.stdout
    lines = (out / "findings.jsonl").read_text().splitlines()
    ended = [it for it in map(json.loads, lines) if it["state"] == "ok"]
    parts = next(stage for stage in STAGES if stage.name == "verify kv").parts_of(
        Settings("shim", 3, False)
    )
    assert [it["part"] for it in ended] == list(parts)
    assert record.PATH.read_bytes() == before
    files = {path.name for path in out.iterdir()}
    assert files == {"findings.jsonl", "log.txt", "report.txt"}  # and verified.json of a full run


def test_what_is_known_is_kept_with_the_other_results_too(tmp_path: Path) -> None:
    trail, paths = Trail(tmp_path / "findings.jsonl"), (tmp_path / "kernels", tmp_path / "out")
    trail.add(Finding("verify kv", "move bfloat16", State.OK))
    script.keep(trail, Settings("cuda", 7, False), paths)
    assert record.read(paths[0]) == record.read(paths[1])
    assert record.read(paths[1]).kernels["move"].seed == 7


def test_a_stage_leaves_its_time_to_the_later_ones(tmp_path: Path) -> None:
    limits = {stage.name: stage.limit_s for stage in STAGES}
    assert sum(limits.values()) < 9 * 60
    deadlines = {}

    def run(stage: Stage, *rest: Any) -> None:
        deadlines[stage.name] = rest[-1]

    args = argparse.Namespace(out=tmp_path, only=["verify kv", "system"])
    trail = Trail(tmp_path / "findings.jsonl")
    script.check(args, Settings("shim", 1, True), trail, run)
    assert list(deadlines) == ["verify kv", "system"]
    assert deadlines["system"] - deadlines["verify kv"] == pytest.approx(limits["system"])


def test_a_stage_whose_packages_are_missing_is_recorded(tmp_path: Path) -> None:
    trail, settings = Trail(tmp_path / "findings.jsonl"), Settings("shim", 1, True)
    stage = Stage("system", "no_such_module:parts", 10)
    script.run(stage, argparse.Namespace(out=tmp_path), settings, trail, 0.0)
    (finding,) = trail.findings()
    assert finding.state is State.SKIPPED
    assert "no_such_module" in finding.problem and "--wheels" in finding.problem
