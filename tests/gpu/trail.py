"""The findings of a check so far, one on each line, so that a run that is cut keeps them.

A part is begun, then it ends well with figures or badly with a problem; one that was begun and
never ended took its process with it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

Figures = dict[str, float | str]


class State(StrEnum):
    """How far a part came."""

    BEGUN = "begun"
    OK = "ok"
    FAILED = "failed"
    LOST = "lost"  # its process died or was out of time
    SKIPPED = "skipped"  # it was not tried, and the problem says why


@dataclass(frozen=True, slots=True)
class Finding:
    """One part of one stage."""

    stage: str
    part: str
    state: State
    problem: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0


class Trail:
    """A file of findings, written by the parts' processes one after another."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, finding: Finding) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(finding)) + "\n")

    def findings(self) -> list[Finding]:
        """Return the last finding of every part, in the order in which they were begun."""
        last: dict[tuple[str, str], Finding] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the writer was killed in the middle of it
                finding = Finding(**{**entry, "state": State(entry["state"])})
                last[finding.stage, finding.part] = finding
        return list(last.values())

    def open_part(self, stage: str) -> Finding | None:
        """Return the part of a stage that was begun and has not ended."""
        begun = [it for it in self.findings() if it.stage == stage and it.state is State.BEGUN]
        return begun[-1] if begun else None


def figures_of(findings: list[Finding]) -> Figures:
    """Return all figures of the parts that ended well; their names are unique."""
    return {
        name: value for it in findings if it.state is State.OK for name, value in it.figures.items()
    }
