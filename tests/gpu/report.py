"""The report of a check for people: findings, targets, figures; and the exit status."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.gpu.targets import TARGETS, Reached, Verdict, judge
from tests.gpu.trail import Figures, Finding, State, figures_of

EXIT_OK: Final = 0
EXIT_WRONG: Final = 1  # a kernel or the system is wrong, or broke
EXIT_USAGE: Final = 2
EXIT_NO_DEVICE: Final = 3  # nothing could be checked
EXIT_BELOW: Final = 4  # all is right, but a target was missed or could not be measured


def verdicts(findings: list[Finding]) -> list[Verdict]:
    figures = figures_of([it for it in findings if it.stage.startswith("bench")])
    return [judge(target, figures) for target in TARGETS]


def exit_status(findings: list[Finding], *, is_full: bool) -> int:
    """Return the status of a run; a run that is not full has no targets to reach."""
    bad = [it for it in findings if it.state in (State.FAILED, State.LOST, State.BEGUN)]
    if any(not _is_harmless(it) for it in bad):
        return EXIT_WRONG
    if not any(it.state is State.OK for it in findings if it.stage.startswith("verify")):
        return EXIT_WRONG  # nothing was shown to be right
    if not is_full:
        return EXIT_WRONG if bad else EXIT_OK
    needed = [it for it in findings if it.stage.startswith(("verify", "system"))]
    cut = [it for it in needed if it.state is State.SKIPPED]
    short = [it for it in verdicts(findings) if it.reached in (Reached.MISSED, Reached.UNKNOWN)]
    reachable = [it for it in short if it.target.target is not None]
    return EXIT_BELOW if bad or cut or reachable else EXIT_OK


def _is_harmless(bad: Finding) -> bool:
    """Whether a finding costs a figure or a proof, but shows nothing to be wrong."""
    is_slow_tool = bad.stage == "sanitizer" and bad.state is State.LOST
    return bad.stage.startswith("bench") or is_slow_tool


def render(findings: list[Finding], title: str, *, is_full: bool) -> str:
    """Return the whole report."""
    lines = [title, "", *_parts(findings)]
    if is_full:
        lines += ["", *_targets(findings)]
    return "\n".join([*lines, "", *_figures(findings)])


def _parts(findings: list[Finding]) -> Iterator[str]:
    yield f"{'stage':<18}{'part':<30}{'':<9}{'s':>6}"
    for it in findings:
        line = f"{it.stage:<18}{it.part:<30}{it.state.upper():<9}{it.seconds:>6.1f}"
        yield f"{line}  {it.problem}".rstrip()


def _targets(findings: list[Finding]) -> Iterator[str]:
    yield f"{'ratio in this run':<34}{'is':>8}{'target':>9}{'stretch':>9}"
    for target, ratio, reached in verdicts(findings):
        figures = (_ratio(ratio), _ratio(target.target), _ratio(target.stretch))
        yield f"{target.name:<34}{figures[0]:>8}{figures[1]:>9}{figures[2]:>9}  {reached}"


def _figures(findings: list[Finding]) -> Iterator[str]:
    yield "figures"
    shown = [it for it in findings if it.stage.startswith(("machine", "logits", "bench", "system"))]
    figures: Figures = figures_of(shown)
    if not figures:
        yield "    none"
    for name, value in figures.items():
        yield f"    {name:<32}{value if isinstance(value, str) else format(value, '.4g'):>14}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
