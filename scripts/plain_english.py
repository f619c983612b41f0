"""List docstrings that begin with a clause instead of a noun, and too long commit subjects.

`scripts/check` runs this.  A docstring that begins with "Who", "What" or "That which" does not name
its subject.  It should name it instead ("The fixed fields of a response, ...").
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("wire", "router", "worker", "kernels", "scripts", "tests")
RIDDLE: Final = re.compile(r"(Who|What|That which)\b")
MAX_SUBJECT: Final = 72
SCRIPT: Final = "scripts/plain_english.py"


def riddles(folder: Path) -> Iterator[str]:
    """Yield `file:line: first line` for each docstring below `folder` that matches `RIDDLE`."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and RIDDLE.match(text):
                line = getattr(node, "lineno", 1)
                yield f"{path.relative_to(folder.parent)}:{line}: {text.splitlines()[0]}"


def long_subjects(repository: Path) -> Iterator[str]:
    """Yield `commit: subject` for each too long subject since the commit that added `SCRIPT`.

    Older commits are not checked.  Yield nothing outside a git checkout, or if the history does not
    contain that commit.
    """
    added = _git(repository, "log", "--diff-filter=A", "--format=%H", "--", SCRIPT).split()
    if not added:
        return
    for line in _git(repository, "log", "--format=%h %s", f"{added[-1]}..HEAD").splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > MAX_SUBJECT:
            yield f"{commit}: {subject}"


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def main() -> int:
    """Print all findings; return 1 if there are any."""
    findings = [line for folder in FOLDERS for line in riddles(ROOT / folder)]
    findings += long_subjects(ROOT)
    for line in findings:
        print(line)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
