"""Start and restart child processes.  On Linux, they never outlive their parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from structlog.typing import FilteringBoundLogger

from wire.process.settings import EX_RESTART

MIN_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
# After a child has run for this long, its next restart has the shortest pause again.
HEALTHY_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1
# Fields of `sys.flags` that change imports or code, and their environment variables.
_FLAGS: Final = {
    "safe_path": "PYTHONSAFEPATH",
    "no_user_site": "PYTHONNOUSERSITE",
    "optimize": "PYTHONOPTIMIZE",
    "dont_write_bytecode": "PYTHONDONTWRITEBYTECODE",
}


def same_release(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a child imports the same code as this process.

    PYTHONPATH starts with this release, and the interpreter gets the flags of this one.  If this
    interpreter ignores Python's variables (-E, -I), the child does not get them.
    """
    if sys.flags.ignore_environment:
        environ = {name: value for name, value in environ.items() if not name.startswith("PYTHON")}
    own_flags = {name: getattr(sys.flags, flag) for flag, name in _FLAGS.items()}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
    flags = {name: str(int(value)) for name, value in own_flags.items() if value}
    return {**environ, **flags, "PYTHONPATH": path}


async def start_child(
    command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Start a program of this release that is killed when this process ends.

    The child has its own session, so that Ctrl-C only signals this process, which then stops it.
    Raises OSError or RuntimeError if memory, file descriptors or threads are exhausted.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        env=same_release(environ),
        pass_fds=tuple(pass_fds),
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


def signal_child(child: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal to a child, unless it has ended."""
    with suppress(ProcessLookupError):
        child.send_signal(number)


async def lives(
    run: Callable[[], Awaitable[int]], log: FilteringBoundLogger, min_pause_s: float
) -> AsyncIterator[int]:
    """Restart a child endlessly, with backoff, and yield each exit status.

    Args:
        run: Starts the child and returns its exit status.  If it raises, the status is 1.
        log: A logger with the child's name bound to it.
    """
    loop, pause_s = asyncio.get_running_loop(), min_pause_s
    while True:
        started_at = loop.time()
        try:
            status = await run()
        except (OSError, RuntimeError) as error:  # out of memory, file descriptors or threads
            log.error("cannot start child process", reason=str(error))
            status = 1
        yield status
        if status in (0, EX_RESTART) or loop.time() - started_at > HEALTHY_S:
            pause_s = min_pause_s
        if status == EX_RESTART:
            log.info("child process starts again, as it was asked to")
            continue
        log.warning("child process ended", status=status, restart_in_s=pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def die_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` for subprocess that makes Linux kill the child with its parent.

    The child is killed when the thread that started it ends for any reason (PR_SET_PDEATHSIG).
    """
    if sys.platform != "linux":
        return None
    parent, prctl = os.getpid(), ctypes.CDLL(None, use_errno=True).prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    return arrange
