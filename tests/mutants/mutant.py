"""Draws mutants, each of one change: every wing in turn, a file of it, a place in that."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants.changes import Change, changes, members_of_enums

PACKAGES: Final = ("wire", "router", "worker", "kernels")
# Letters of a change that a line shows of both its ends.
MAX_SHOWN: Final = 64


class Mutant(NamedTuple):
    """A change of one file, a path below the root; `old` is what stands there before."""

    path: Path
    change: Change
    old: str

    @property
    def wing(self) -> str:
        return str(self.path.parent)

    def __str__(self) -> str:
        kind, line, _, _, new = self.change
        return f"{self.path}:{line} {kind}: {_shown(self.old)} -> {_shown(new)}"


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 24]} ... {line[-20:]}"


def drawn(root: Path, seed: int, places: Sequence[str] = ()) -> Iterator[Mutant]:
    """Yield mutants of the tree under `root`, each once, until there are no others.

    Args:
        places: Wings (`wire/aio`), files (`wire/aio/tls.py`) or lines (`wire/aio/tls.py:154`)
            that they are to be of; none are all.
    """
    files = sorted(path for name in PACKAGES for path in (root / name).rglob("*.py"))
    enums = members_of_enums(path.read_bytes() for path in files)
    wings: dict[str, list[Path]] = {}
    for path in (file.relative_to(root) for file in files):
        if path.name == "__main__.py":  # whole processes only run them
            continue
        if not places or any(_is_of(path, place) for place in places):
            wings.setdefault(str(path.parent), []).append(path)

    def mutants(path: Path) -> list[Mutant]:
        source = (root / path).read_bytes()
        return [
            Mutant(path, change, source[change.start : change.end].decode())
            for change in changes(source, enums)
            if not places or any(_is_of(path, place, change.line) for place in places)
        ]

    choose, left = random.Random(seed), dict[Path, list[Mutant]]()
    turns = sorted(wings)
    choose.shuffle(turns)
    while turns:
        for wing in tuple(turns):
            while wings[wing]:
                path = choose.choice(wings[wing])
                if path not in left:
                    left[path] = mutants(path)
                if left[path]:
                    yield left[path].pop(choose.randrange(len(left[path])))
                    break
                wings[wing].remove(path)
            else:
                turns.remove(wing)


def _is_of(path: Path, place: str, line: int | None = None) -> bool:
    """Whether a file, or a line of it, is of a place."""
    name, _, wanted = place.partition(":")
    if str(path.parent) == name:
        return True
    return str(path) == name and (line is None or wanted in ("", str(line)))
