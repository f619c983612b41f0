"""Runs the tests of a mutant's module in a copy of the tree, and says whether one notices.

Which tests count: first the mirrored file, `tests/wire/aio/test_tls.py` for `wire/aio/tls.py`; if
it passes, the other test files of that folder that import the module, or another of the wing that
does.  No tests of other wings or of whole clusters: those notice much, late, and say little of
where.  A test that fails has noticed only if it passes without the change.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants.mutant import Mutant

# Beside what git ignores: kernels that the shim has compiled are the same in every copy.
SHIM: Final = Path(".pytest_cache") / "shim"
NOT_COPIED: Final = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", "__pycache__", ".hypothesis"
)
# Of one test; and of the tests of a module together.
TEST_S: Final = 90
TESTS_S: Final = 600
FAILED: Final = re.compile(r"(?:FAILED|ERROR) (.+?)(?: - .*)?$")
TIMEOUT: Final = "+ Timeout +"
HANG: Final = "a hang"
# Of a test whose parameters are no text, pytest shows another name than it takes.
NOT_FOUND: Final = "no such test"
# Exit statuses of pytest.
_NO_SUCH_TEST: Final = 4
_NO_TESTS: Final = 5


class Verdict(NamedTuple):
    """The verdict on a mutant: the test that noticed, and its stage.

    `noticed_by` is empty if none did.  `is_sound` is False if that test fails without the change.
    """

    noticed_by: str = ""
    stage: str = ""
    is_sound: bool = True


class Tree:
    """A copy of the tree that mutants are put into, one at a time."""

    def __init__(self, root: Path, copy: Path) -> None:
        self._root, self._copy = root, copy
        shutil.copytree(root, copy, ignore=NOT_COPIED, symlinks=True)
        (copy / SHIM.parent).mkdir()
        (root / SHIM).mkdir(parents=True, exist_ok=True)
        (copy / SHIM).symlink_to(root / SHIM)

    def judge(self, mutant: Mutant) -> Verdict:
        """Run the tests that count, the mirrored file first."""
        path = self._copy / mutant.path
        source, times = path.read_bytes(), path.stat()
        for stage, tests in stages_of(self._copy, mutant.path).items():
            path.write_bytes(mutant.change.made_in(source))
            # Python takes byte code for that of a file of the same size and second.
            os.utime(path, (times.st_atime, times.st_mtime + 2))
            try:
                noticed_by = self._first_failure(tests)
            finally:
                path.write_bytes(source)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if noticed_by:
                return Verdict(noticed_by, stage, self._passes(noticed_by, tests))
        return Verdict()

    def _passes(self, test: str, tests: Sequence[str]) -> bool:
        """Whether a test passes without a change; where it cannot be named alone, its file does."""
        file, _, name = test.partition("::")
        failure = self._first_failure([test] if name else tests)
        return not (self._first_failure([file]) if failure == NOT_FOUND else failure)

    def _first_failure(self, tests: Sequence[str]) -> str:
        """Run tests; return the first that fails, the file that cannot be imported, or HANG."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-rfE", "--no-header"]
        command += ["-p", "no:cacheprovider", "--hypothesis-seed=0"]
        # By signal, a loop whose test hangs would go on until its tasks have ended.
        command += [f"--timeout={TEST_S}", "--timeout-method=thread", *tests]
        environment = os.environ | {
            "PYTHONPATH": str(self._copy),  # what tests start must not find the tree itself
            "XDG_CACHE_HOME": str(self._copy / ".kernels_cache"),
        }
        with subprocess.Popen(
            command,
            cwd=self._copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        ) as process:
            assert process.stdout is not None
            watchdog = threading.Timer(TESTS_S, _end, [process])
            watchdog.start()
            try:
                # A process whose test failed may never end: a thread or a socket is left.
                for line in process.stdout:
                    if failed := FAILED.match(line):
                        return failed[1]
                    if TIMEOUT in line:
                        return HANG
                code = process.wait()
            finally:
                watchdog.cancel()
                _end(process)
        if code in (0, _NO_TESTS):
            return ""
        if code == _NO_SUCH_TEST:
            return NOT_FOUND
        return HANG if code == -signal.SIGKILL else "a crash"


def _end(process: subprocess.Popen[str]) -> None:
    """End the tests and whatever they have started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def stages_of(root: Path, path: Path) -> dict[str, list[str]]:
    """Return the test files that count for a module, by stage; only stages that have some."""
    folder = Path("tests") / path.parent
    mirrored = root / folder / f"test_{path.name}"
    imports = {
        _name_of(it.relative_to(root)): _imported(it.read_text())
        for it in (root / path.parent).glob("*.py")
    }
    reach = {_name_of(path)}
    while more := {name for name, them in imports.items() if name not in reach and reach & them}:
        reach |= more
    beside = sorted({*(root / folder).glob("test_*.py")} - {mirrored})
    stages = {
        "module": [mirrored] if mirrored.exists() else [],
        "wing": [test for test in beside if reach & _imported(test.read_text())],
    }
    return {
        stage: [str(test.relative_to(root)) for test in tests]
        for stage, tests in stages.items()
        if tests
    }


def _name_of(path: Path) -> str:
    return ".".join(path.parent.parts if path.stem == "__init__" else path.with_suffix("").parts)


def _imported(source: str) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
