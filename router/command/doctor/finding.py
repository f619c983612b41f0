"""The result of a check, and the report of all results as text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final, Literal

import msgspec
from msgspec import Struct

from router.command.terminal import printable

Level = Literal["ok", "warning", "fault"]
LEVELS: Final = ("fault", "warning", "ok")


class Finding(Struct, frozen=True):
    """The result of one check.

    Attributes:
        level: "fault" if something does not work, "warning" if it may not or is slow.
        check: The name of the check, such as "ports".
        where: The file, endpoint, setting or worker.
        what: What was found.
        cure: The command that mends it, or what to do; "" if there is nothing to do.
    """

    level: Level
    check: str
    where: str
    what: str
    cure: str = ""


# Nothing has to be done about `ok`, so it has no cure.
ok: Final = partial(Finding, "ok")
warning: Final = partial(Finding, "warning")
fault: Final = partial(Finding, "fault")


def text_of(findings: Sequence[Finding]) -> str:
    """Format the findings for a terminal, faults last, where they are seen."""
    lines: list[str] = []
    for each in sorted(findings, key=lambda each: LEVELS.index(each.level), reverse=True):
        lines.append(f"{each.level:<8} {each.check:<10} {each.where}: {each.what}")
        if each.cure:
            lines.append(f"{'':<20}-> {each.cure}")
    counts = Counter(each.level for each in findings)
    lines.append(f"{counts['fault']} faults, {counts['warning']} warnings, {counts['ok']} ok")
    # Workers wrote parts of them.
    return "".join(printable(line).replace("\n", " ") + "\n" for line in lines)


def json_of(findings: Sequence[Finding]) -> str:
    """Format the findings as JSON: the list, and the number of each level."""
    counts = Counter(each.level for each in findings)
    body = {"findings": list(findings)} | {level: counts[level] for level in LEVELS}
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"
