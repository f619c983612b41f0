"""A command of `baton` on a pseudo-terminal."""

from __future__ import annotations

import codecs
import os
import pty
import signal
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

from tests.cluster import ROOT, START_S, until


class Terminal:
    """A command of `baton` on a pseudo-terminal; `seen` is all that it has written."""

    def __init__(
        self, *words: str, cwd: Path = ROOT, environ: dict[str, str] | None = None
    ) -> None:
        self._fd, theirs = pty.openpty()
        attributes = termios.tcgetattr(theirs)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        os.set_blocking(self._fd, False)
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end in a character
        # The terminal of a session of its own, so that Ctrl-C reaches it as it does a user's.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "router.command", *words],
            cwd=cwd,
            env=os.environ | {"COLUMNS": "300", "PYTHONPATH": str(ROOT), **(environ or {})},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str, timeout_s: float = START_S) -> str:
        """Wait until this was written after what was waited for before; return what was before."""
        try:
            until(lambda: text in self._read(), text, timeout_s)
        except TimeoutError:
            raise AssertionError(f"not written: {text!r}, but {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before

    def _read(self) -> str:
        with suppress(OSError):  # nothing there, or the process has ended
            self.seen += self._decoder.decode(os.read(self._fd, 1 << 16))
        return self.seen

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        os.close(self._fd)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, whose Ctrl-C ends the process."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    # Shells start background jobs, tests among them, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
