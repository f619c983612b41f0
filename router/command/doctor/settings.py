"""Reads the settings that the router and the workers of this machine would get."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib import import_module
from typing import Any, Final, NamedTuple

from router.command.doctor.finding import Finding, fault, ok, warning
from router.config import Config
from router.local import command
from wire.process.settings import EX_CONFIG, SharedSettings, parse

# Imported by name when needed, as `parse` does: its settings are text and need none of its package.
WORKER: Final = "worker.config"
# For local workers, whose router is on this machine and may take any free port.
BUS_HERE: Final = "tcp://127.0.0.1:5570"
_MISSPELT: Final = re.compile(r"warning: (\S+) is not a setting(?:; did you mean (\S+)\?)?")


class Site(NamedTuple):
    """The settings of the processes of one machine.

    Attributes:
        router: The settings of the router.
        workers: The settings of each worker of --local, else those of one worker that is started
            with the same shared settings; each a `worker.config.Config`.
        is_local: Whether the workers are those of --local.
    """

    router: Config
    workers: Sequence[Any]
    is_local: bool


def read_site(argv: Sequence[str]) -> tuple[Site | None, list[Finding]]:
    """Parse the flags of a router, as the router itself would.

    Returns the settings, None if they are wrong, and the findings: wrong settings, an unreadable or
    wrong file of --config, and misspelt environment variables.

    Raises:
        SystemExit: 0 after --help.
    """
    router, found = _parse(Config, argv, beside=WORKER)
    if router is None:
        return None, found
    workers = []
    for role, rank in router.local_workers or [("", 0)]:
        worker, trouble = _parse(
            import_module(WORKER).Config, _flags(router, role, rank), "router.config"
        )
        found += [each for each in trouble if each not in found]
        if worker is None:
            return None, found
        workers.append(worker)
    if not found:
        found = [ok("settings", "flags and environment", "every setting is known and valid")]
    return Site(router, workers, bool(router.local_workers)), found


def _flags(router: Config, role: str, rank: int) -> list[str]:
    """Return the flags of a worker of this router; without a role, those of one started by hand."""
    if role:
        return command(router, BUS_HERE, role, rank)[3:]
    given = router.model_dump(
        include={*SharedSettings.model_fields}, exclude_unset=True, exclude_none=True
    )
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return [*flags, *shlex.split(router.worker_args)]


def _parse(kind: Any, argv: Sequence[str], beside: str) -> tuple[Any, list[Finding]]:
    """Parse the settings of a program; turn what it would write to stderr into findings."""
    said = io.StringIO()
    config = None
    try:
        with redirect_stderr(said):
            config = parse(kind, argv, beside=beside)
    except SystemExit as ended:
        if ended.code != EX_CONFIG:
            raise
    return config, [_finding(line) for line in said.getvalue().splitlines()]


def _finding(line: str) -> Finding:
    """Return the finding for a line that `parse` has written."""
    misspelt = _MISSPELT.search(line)
    if misspelt is None:
        reason = line.partition(": ")[2]
        cure = "correct that setting, then run baton doctor again for the checks that need it"
        return fault("settings", line.partition(": ")[0], reason, cure)
    name, close = misspelt[1], misspelt[2]
    cure = f'export {close}="${name}"; unset {name}' if close else f"unset {name}"
    return warning("settings", name, "is no setting, so nothing reads it", cure)
