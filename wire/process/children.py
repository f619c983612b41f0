"""Child processes: started, restarted, and on Linux never outliving their parent."""

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

MIN_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
# After a child has run for this long, the pause is short again.
HEALTHY_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1
# Fields of `sys.flags` that change imports or code, and the variables that set them.
_FLAGS: Final = {
    "safe_path": "PYTHONSAFEPATH",
    "no_user_site": "PYTHONNOUSERSITE",
    "optimize": "PYTHONOPTIMIZE",
    "dont_write_bytecode": "PYTHONDONTWRITEBYTECODE",
}


def same_release(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a child of ours imports what this process would import.

    Its path begins with ours, and its interpreter has our flags.  If ours ignores Python's
    variables (-E, -I), the child does not get them.
    """
    if sys.flags.ignore_environment:
        environ = {name: it for name, it in environ.items() if not name.startswith("PYTHON")}
    given = {name: getattr(sys.flags, flag) for flag, name in _FLAGS.items()}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
    flags = {name: str(int(value)) for name, value in given.items() if value}
    return {**environ, **flags, "PYTHONPATH": path}


async def start_child(
    command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Start a program of this release that ends with us.

    It is in a session of its own: Ctrl-C reaches only us, and we end it.
    Raises OSError or RuntimeError: there is no memory, descriptor or thread for it.
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
    """Send a child a signal if it is not gone."""
    with suppress(ProcessLookupError):
        child.send_signal(number)


async def lives(
    run: Callable[[], Awaitable[int]], log: FilteringBoundLogger, min_pause_s: float
) -> AsyncIterator[int]:
    """Run a child again and again, after pauses that grow, and yield how it ended each time.

    Args:
        run: Starts it and waits for its exit status; where it cannot be started, that is 1.
        log: Names the child.
    """
    loop, pause_s = asyncio.get_running_loop(), min_pause_s
    while True:
        started_at = loop.time()
        try:
            status = await run()
        except (OSError, RuntimeError) as error:  # no memory, descriptor or thread to be had
            log.error("cannot start child process", reason=str(error))
            status = 1
        yield status
        if loop.time() - started_at > HEALTHY_S:
            pause_s = min_pause_s
        log.warning("child process ended", status=status, restart_in_s=pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def die_with_parent() -> Callable[[], None] | None:
    """Return what a child calls before it becomes another program (`preexec_fn` of subprocess).

    Linux kills it when the thread that started it ends, however that happens (PR_SET_PDEATHSIG).
    """
    if sys.platform != "linux":
        return None
    parent, prctl = os.getpid(), ctypes.CDLL(None, use_errno=True).prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died before we asked.
            os._exit(1)

    return arrange
