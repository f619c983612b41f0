"""Text on a terminal executes nothing, and the status is the last line."""

from __future__ import annotations

import io

import pytest

from router.command.terminal import StatusLine, printable, say


def test_control_characters_are_not_printed() -> None:
    assert printable("\x1b]0;title\x07a\tb\nc\r\x9b2J\x7f é 👩‍💻") == "]0;titlea\tb\nc2J é 👩‍💻"


def test_lines_are_printed_above_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "8")
    stream = io.StringIO()
    status = StatusLine(stream)
    status.show("loading weights")
    status.show("loading weights")
    status.print("a long warning\x1b[2J")
    status.print("another")
    status.show("loading weights")
    status.show("")
    clear = "\r\x1b[K"
    lines = f"{clear}a long warning[2J\nanother\n"
    assert stream.getvalue() == f"{clear}loading{lines}{clear}loading{clear}"


def test_text_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    say("a", end="")
    say("b")
    assert capsys.readouterr().out == "ab\n"
