"""Text on a terminal: whole lines, a status line that is rewritten, and no control characters."""

from __future__ import annotations

import shutil
import sys
from typing import Final, TextIO

# Terminals execute these: the C0 and C1 control characters, but tab and newline, and DEL.
_CONTROLS: Final = {*range(32), *range(127, 160)} - {ord("\t"), ord("\n")}
_PRINTABLE: Final = dict.fromkeys(_CONTROLS)
_CLEAR_LINE: Final = "\r\x1b[K"


class Failure(Exception):
    """A command cannot go on: `baton` writes the message, which is a sentence, and returns 1."""


def printable(text: str) -> str:
    """Return `text` without control characters, with which a model could write to the screen."""
    return text.translate(_PRINTABLE)


def say(text: str = "", end: str = "\n") -> None:
    """Write text to stdout at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


class StatusLine:
    """The last line of a terminal, rewritten by each `show`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace the status by this text, cut to the width of the terminal; "" removes it."""
        text = printable(text)[: shutil.get_terminal_size().columns - 1]
        if text != self._shown:
            self._shown = text
            self._write(_CLEAR_LINE + text)

    def print(self, text: str) -> None:
        """Write whole lines in place of the status, until the next `show`."""
        self._write(f"{_CLEAR_LINE if self._shown else ''}{printable(text)}\n")
        self._shown = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
