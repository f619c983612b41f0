"""The exit status and the report of a run."""

from __future__ import annotations

import pytest

from tests.gpu.report import EXIT_BELOW, EXIT_OK, EXIT_WRONG, exit_status, render
from tests.gpu.targets import TARGETS
from tests.gpu.trail import Figures, Finding, State

# Every target is reached where what is measured is a little more than its limit.
GOOD: Figures = {
    **{it.limit: 1000.0 for it in TARGETS},
    **{it.measured: 1010.0 for it in TARGETS},
}
VERIFIED = Finding("verify kv", "move bfloat16", State.OK, figures={"cases": 24}, seconds=1.5)


def run(figures: Figures = GOOD, *more: Finding) -> list[Finding]:
    return [VERIFIED, Finding("bench kernels", "all", State.OK, figures=figures), *more]


def test_a_run_that_reaches_every_target_is_well() -> None:
    assert exit_status(run(), is_full=True) == EXIT_OK  # cuDNN's row has a stretch only


@pytest.mark.parametrize("name", ["decode_long_gbs", "copy_gbs"])
def test_a_target_that_is_missed_or_unknown_has_its_own_status(name: str) -> None:
    missed, unknown = GOOD | {"decode_long_gbs": 700.0}, dict(GOOD)
    del unknown[name]
    assert exit_status(run(missed), is_full=True) == EXIT_BELOW
    assert exit_status(run(unknown), is_full=True) == EXIT_BELOW
    assert exit_status(run(missed), is_full=False) == EXIT_OK


@pytest.mark.parametrize("state", [State.FAILED, State.LOST, State.BEGUN])
@pytest.mark.parametrize("stage", ["verify attention", "system", "machine"])
def test_what_is_wrong_or_broke_is_wrong(state: State, stage: str) -> None:
    for is_full in (True, False):
        assert exit_status(run(GOOD, Finding(stage, "x", state)), is_full=is_full) == EXIT_WRONG


def test_a_bench_that_broke_is_below_and_a_tool_that_is_absent_is_well() -> None:
    broke = Finding("bench peers", "cudnn 8k", State.FAILED)
    absent = Finding("sanitizer", "memcheck", State.SKIPPED, "not installed")
    untried = Finding("verify attention", "tiled 64 bfloat16", State.SKIPPED, "no time left")
    bare = Finding("system", "all", State.SKIPPED, "No module named 'httpx': see --wheels")
    assert exit_status(run(GOOD, broke), is_full=True) == EXIT_BELOW
    assert exit_status(run(GOOD, absent), is_full=True) == EXIT_OK
    assert exit_status(run(GOOD, untried), is_full=True) == EXIT_BELOW
    assert exit_status(run(GOOD, bare), is_full=True) == EXIT_BELOW


def test_a_sanitizer_that_complains_is_wrong_and_one_that_is_slow_is_below() -> None:
    for state, status in ((State.FAILED, EXIT_WRONG), (State.LOST, EXIT_BELOW)):
        assert (
            exit_status(run(GOOD, Finding("sanitizer", "memcheck", state)), is_full=True) == status
        )


def test_nothing_verified_is_not_right() -> None:
    skipped = Finding("verify kv", "all", State.SKIPPED)
    assert exit_status([skipped], is_full=False) == exit_status([], is_full=True) == EXIT_WRONG


def test_the_report_shows_parts_problems_ratios_and_figures() -> None:
    findings = run(GOOD, Finding("system", "serve", State.FAILED, "2 of 8 answers: HTTP 500"))
    text = render(findings, "a title, seed 7", is_full=True)
    lines = text.splitlines()
    assert lines[0] == "a title, seed 7"
    assert any("move bfloat16" in line and "OK" in line and "1.5" in line for line in lines)
    assert any("serve" in line and "FAILED" in line and "HTTP 500" in line for line in lines)
    decode = next(line for line in lines if line.startswith("decode, KV of 1 GB"))
    assert decode.split()[-4:] == ["1.01", "0.80", "0.95", "stretch"]
    assert any(line.split() == ["copy_gbs", "1000"] for line in lines)
    assert "stretch" not in render(findings, "a title", is_full=False)
