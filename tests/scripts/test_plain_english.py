"""The script that lists riddles among docstrings, and commit subjects that are too long."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from scripts.plain_english import MAX_SUBJECT, SCRIPT, long_subjects, riddles

if TYPE_CHECKING:
    from pathlib import Path

MODULE = '''"""What a module does."""

class Plain:
    """The fields of a response.  What follows is no riddle."""

    def riddle(self):
        """Who reads
        slowly.
        """

    def whole(self):
        """Whole blocks."""

def that():
    """That which is sent."""
'''


def test_docstrings_without_a_subject_are_listed_with_their_place(tmp_path: Path) -> None:
    folder = tmp_path / "wing"
    folder.mkdir()
    (folder / "module.py").write_text(MODULE)
    assert list(riddles(folder)) == [
        "wing/module.py:1: What a module does.",
        "wing/module.py:14: That which is sent.",
        "wing/module.py:6: Who reads",
    ]


def test_subjects_after_the_script_are_measured(tmp_path: Path) -> None:
    def commit(subject: str, file: str) -> None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
        author = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        for arguments in (["add", "."], [*author, "commit", "-q", "-m", subject]):
            subprocess.run(["git", *arguments], cwd=tmp_path, check=True)

    assert list(long_subjects(tmp_path)) == []
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit("o" * (MAX_SUBJECT + 1), "old")
    commit("Add the script", SCRIPT)
    commit("f" * MAX_SUBJECT, "fits")
    commit("l" * (MAX_SUBJECT + 1), "long")
    assert [line.partition(": ")[2] for line in long_subjects(tmp_path)] == [
        "l" * (MAX_SUBJECT + 1)
    ]
