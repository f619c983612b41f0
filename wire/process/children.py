"""Child processes: of the same release, and on Linux none outlives who started it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def same_release(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with a path for imports that begins with ours."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
    return {**environ, "PYTHONPATH": path}


async def start_child(
    command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Start a program of this release that ends with us.

    It is in a session of its own: Ctrl-C reaches only us, and we end it.

    Raises:
        OSError, RuntimeError: There is no memory, descriptor or thread for it.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        env=same_release(environ),
        pass_fds=tuple(pass_fds),
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


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
