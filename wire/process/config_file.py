"""A TOML file of settings, one for the router and the workers of a machine.

    model = "Qwen/Qwen3-0.6B"     # above all tables: for each program that has this setting

    [router]
    http = "0.0.0.0:8000"

    [worker]                      # a program's own table overrides what is above
    host_kv_bytes = 8_000_000_000
    router = ["tcp://10.0.0.5:5570", "tcp://10.0.0.6:5570"]

Keys are the names of flags with underscores.  Values become the text that a flag would have, so
that a setting has one notation: `local = [1, 1]` is `--local 1,1`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from re import fullmatch, match
from typing import Any, Final, NamedTuple

# The name of the table for keys above all tables.
TOP: Final = ""


class Entry(NamedTuple):
    """The text of a value, and the line of its key; 0 if the line was not found."""

    text: str
    line: int


def read_tables(path: Path) -> dict[str, dict[str, Entry]]:
    """Read a file into entries by table and key; keys above all tables are under `TOP`.

    Raises:
        ValueError: The file cannot be read, is not TOML, or nests tables.
    """
    try:
        source = path.read_text(encoding="utf-8")
        parsed = tomllib.loads(source)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    tables: dict[str, dict[str, Any]] = {TOP: {}}
    for key, value in parsed.items():
        tables.update({key: value} if isinstance(value, dict) else {})
        if not isinstance(value, dict):
            tables[TOP][key] = value
    lines = _lines(source)
    return {
        table: {
            key: Entry(_text(path, key, value), lines.get((table, key), 0))
            for key, value in entries.items()
        }
        for table, entries in tables.items()
    }


def _lines(source: str) -> dict[tuple[str, str], int]:
    """Return the line of each key that is written alone on its line."""
    lines: dict[tuple[str, str], int] = {}
    table = TOP
    for number, line in enumerate(source.splitlines(), 1):
        if (header := fullmatch(r"\s*\[\s*([\w-]+)\s*\]\s*(#.*)?", line)) is not None:
            table = header[1]
        elif (key := match(r"\s*([\w-]+)\s*=", line)) is not None:
            lines.setdefault((table, key[1]), number)
    return lines


def _text(path: Path, key: str, value: object) -> str:
    if isinstance(value, dict):
        raise ValueError(f"{path}: {key} is a table inside a table: settings are not nested")
    if isinstance(value, list):
        return ",".join([_text(path, key, each) for each in value])
    return str(value).lower() if isinstance(value, bool) else str(value)
