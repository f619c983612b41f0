"""`baton serve [FLAGS]`: the router, with `--local auto` unless --local is set anywhere.

On a terminal it shows what the processes do while they load, then what to try, and afterwards only
warnings and errors.  Elsewhere it is `python -m router`, whose log lines are JSON.  The flags are
the router's:
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from queue import Empty, Queue
from threading import Thread
from typing import IO, Final

from router.command.progress import Progress
from router.command.terminal import StatusLine
from router.config import Config
from wire.process.children import die_with_parent, same_release
from wire.process.lifetime import ending_signals
from wire.process.settings import DEFAULT, parse_with_origins

# The interval between two turns of the spinner.
TURN_S: Final = 0.25
# Longer lines of the log are shown in parts.
MAX_LINE: Final = 1 << 16
MAX_WAITING_LINES: Final = 1000


def run(argv: Sequence[str]) -> int:
    """Run the router until it ends; return its exit status."""
    flags = [*argv]
    config, origins = parse_with_origins(
        Config, argv, beside="worker.config", program="baton serve", about=__doc__
    )
    if origins["local"] == DEFAULT:
        flags.append("--local=auto")
    if not sys.stderr.isatty():
        from router.__main__ import main

        return main(flags)
    if config.log_level in ("warning", "error"):  # the progress is in lines of level info
        flags.append("--log-level=info")
    return _run_with_progress(flags)


def _run_with_progress(flags: Sequence[str]) -> int:
    progress, status = Progress(time.monotonic()), StatusLine(sys.stderr)
    # In a session of its own the router gets no signals from the terminal, only ours.
    router = subprocess.Popen(
        [sys.executable, "-m", "router", *flags],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=same_release(os.environ),
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )

    def pass_on(number: int, _: object) -> None:
        progress.is_stopping = True
        router.send_signal(number)

    for number in ending_signals():
        signal.signal(number, pass_on)
    assert router.stderr is not None
    lines: Queue[str | None] = Queue(MAX_WAITING_LINES)
    Thread(target=_read, args=(router.stderr, lines), daemon=True).start()
    while True:
        status.show(progress.status(time.monotonic()))
        try:
            line = lines.get(timeout=TURN_S)
        except Empty:
            continue
        if line is None:
            break
        if text := progress.on_line(line, time.monotonic()):
            status.print(text)
    status.show("")
    ended = router.wait()
    return 128 - ended if ended < 0 else ended


def _read(stream: IO[bytes], lines: Queue[str | None]) -> None:
    while line := stream.readline(MAX_LINE):
        lines.put(line.decode(errors="replace").rstrip())
    lines.put(None)
