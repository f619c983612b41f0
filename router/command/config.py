"""`baton config`: every setting of the router or a worker, its value, and where it comes from.

    baton config                              # the router's
    baton config worker --config baton.toml   # a worker's, with these flags

A setting comes from a flag, an environment variable, a systemd credential, a line of the file that
--config names, or the default, in this order.  No value is secret, because secrets are in files
that settings only name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from pydantic_settings import BaseSettings

from router.command.terminal import say
from wire.process.settings import groups, parse_with_origins, shown_value

PROGRAMS: Final = ("router", "worker")


def settings_of(program: str) -> type[BaseSettings]:
    """Return the settings class of the router or a worker."""
    # The worker's settings need none of its other modules; nothing else of it is imported here.
    kind: type[BaseSettings] = import_module(f"{program}.config").Config
    return kind


def run(argv: Sequence[str]) -> int:
    """Print the settings that the router or a worker would have with these flags."""
    program, flags = "router", [word for word in argv if word != "--json"]
    if flags and flags[0] in PROGRAMS:
        program = flags.pop(0)
    if flags and flags[0] in ("-h", "--help"):
        say(f"usage: baton config [router|worker] [--json] [FLAGS]\n\n{__doc__}")
        return 0
    (other,) = {*PROGRAMS} - {program}
    kind = settings_of(program)
    config, origins = parse_with_origins(kind, flags, beside=f"{other}.config")
    if "--json" in argv:
        values: dict[str, Any] = config.model_dump(mode="json")
        rows = {name: {"value": values[name], "origin": origins[name]} for name in values}
        say(json.dumps(rows, indent=1))
        return 0
    values = {name: shown_value(getattr(config, name)) for name in origins}
    name_width, value_width = max(map(len, values)), min(40, max(map(len, values.values())))
    for title, names in groups(kind).items():
        say(f"\n{title}")
        for name in names:
            say(f"  {name:<{name_width}}  {values[name]:<{value_width}}  {origins[name]}")
    return 0
