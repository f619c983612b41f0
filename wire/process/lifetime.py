"""The life of a process: uvloop, signals, exit status, and notices to systemd.

    async def main(stop: asyncio.Event) -> int:
        ...start...
        notify("READY=1", "STATUS=serving")
        await stop.wait()
        ...drain...
        return 0

    sys.exit(run(main))

The first SIGTERM, SIGINT or SIGHUP sets `stop`: `main` is to drain.  A second one, unless it is
SIGHUP, cancels it, and if that does not end the process within `FORCE_S` it is ended.  Exit status:
what `main` returns; 78 for a `ConfigError`, which systemd does not restart; 1 for a bug; 128 + the
signal when forced.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import structlog
import uvloop

from wire.process.exceptions import catch_all
from wire.process.settings import EX_CONFIG, ConfigError

FORCE_S: Final = 2.0
# The time that a slow start requests from systemd, four times as often as needed.
EXTEND_S: Final = 60.0
# Of every thread: without a limit (`ulimit -s unlimited`) threads have 2 MB, and llguidance takes
# up to 4 (`wire.process.structured_output`).
STACK_BYTES: Final = 8 * 1024 * 1024

_LOG = structlog.get_logger(__name__)


Main = Callable[[asyncio.Event], Awaitable[int]]


def run(main: Main) -> int:
    """Run `main` to its end and return the exit status.  Call it once, from the main thread."""
    faulthandler.enable()
    set_stack_size()
    force = _Force()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_live(main, force))
    finally:
        force.disarm()


def open_standard_streams() -> None:
    """Open closed standard streams on /dev/null; call it first of all.

    Otherwise (`<&-`) the first socket gets the number of one: prints write into it, and libuv
    aborts the process when it closes it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, hence this one
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def set_stack_size() -> None:
    """Give `STACK_BYTES` to each thread that is started from now on; `run` does it too."""
    threading.stack_size(STACK_BYTES)


class _Force:
    """Ends the process from a thread, should the loop or an executor be stuck."""

    def __init__(self) -> None:
        self.status = 0
        self._timer: threading.Timer | None = None

    def arm(self, status: int) -> None:
        self.status = status
        if self._timer is None:
            self._timer = threading.Timer(FORCE_S, os._exit, (status,))
            self._timer.start()

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def _live(main: Main, force: _Force) -> int:
    loop = asyncio.get_running_loop()
    catch_all(loop)
    stop = asyncio.Event()
    task = asyncio.ensure_future(main(stop))

    def on_signal(number: signal.Signals) -> None:
        if not stop.is_set():
            _LOG.info("draining", signal=number.name)
            notify("STOPPING=1")
            stop.set()
        elif number != signal.SIGHUP:  # a closed terminal may send it twice
            _LOG.warning("forced to end", signal=number.name)
            force.arm(128 + number)
            task.cancel()

    for number in ending_signals():
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        return force.status or 1
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EX_CONFIG
    except Exception:
        _LOG.exception("the process failed")
        return 1


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end this process; SIGHUP only without nohup."""
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def end_at_once(status: int) -> NoReturn:
    """Flush the log, and end this process whatever its threads do."""
    logging.shutdown()
    os._exit(status)


@contextmanager
def bounded(seconds: float, reason: str, status: int) -> Iterator[None]:
    """End this process with `status` if the body takes longer, even if it blocks the loop.

    Args:
        reason: What takes so long, for the log.
    """

    def give_up() -> None:
        _LOG.error("this process ends by force", waited_s=seconds, reason=reason)
        end_at_once(status)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def notify(*assignments: str) -> bool:
    """Tell systemd, for example ``notify("READY=1", "STATUS=serving")``.

    Returns whether it was told; without systemd, or if it does not listen, nothing happens.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    if path.startswith("@"):  # Linux: a name that is no file
        path = "\0" + path[1:]
    state = "\n".join(assignment.replace("\n", " ") for assignment in assignments)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(state.encode(), path)
        except OSError:
            return False
    return True


def extend_start() -> bool:
    """Ask systemd for `EXTEND_S` more before it calls the start a failure."""
    return notify(f"EXTEND_TIMEOUT_USEC={round(EXTEND_S * 1e6)}")


@contextmanager
def slow_start(status: str) -> Iterator[None]:
    """Keep asking for more time while the body runs, from a thread: the body may block the loop."""
    done = threading.Event()

    def ask() -> None:
        while extend_start() and not done.wait(EXTEND_S / 4):
            pass

    notify(f"STATUS={status}")
    thread = threading.Thread(target=ask, name="slow start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def watchdog_s() -> float | None:
    """Return the period of systemd's watchdog (WatchdogSec=) for this process, None without one."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not usec.isdecimal() or int(usec) == 0 or pid != str(os.getpid()):
        return None
    return int(usec) / 1e6


async def keep_watchdog(is_alive: Callable[[], bool]) -> None:
    """Feed systemd's watchdog at half its period for as long as `is_alive()`; run it as a task."""
    period_s = watchdog_s()
    while period_s is not None:
        if is_alive():
            notify("WATCHDOG=1")
        await asyncio.sleep(period_s / 2)
