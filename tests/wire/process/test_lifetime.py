"""The life of a process, each in a real one, and systemd's socket for real."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from wire.process.lifetime import STACK_BYTES, keep_watchdog, notify, slow_start, watchdog_s

ROOT = Path(__file__).resolve().parents[3]


class Process:
    """A process that runs `body` as its main(stop) and prints `ready` when it is up.

    To SIGHUP it does `hangup`, whatever those do who run the tests, perhaps under nohup.
    """

    def __init__(self, body: str, hangup: str = "SIG_DFL") -> None:
        program = (
            "import asyncio, signal, sys, time, uvloop\n"
            "from wire.process.log import configure\n"
            "from wire.process.lifetime import bounded, end_at_once, run\n"
            "from wire.process.settings import ConfigError\n"
            "async def main(stop: asyncio.Event) -> int:\n"
            "    print('ready', flush=True)\n"
            f"{textwrap.indent(body, '    ')}\n"
            f"signal.signal(signal.SIGHUP, signal.{hangup})\n"
            "configure()\n"
            "sys.exit(run(main))\n"
        )
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read_line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def end(self, *signals: signal.Signals) -> tuple[int, str, str]:
        """Wait until it is up, send the signals (each when the last was answered by a line)."""
        assert self.read_line() == "ready"
        for i, number in enumerate(signals):
            if i:
                assert self.read_line() == "draining"
            self.popen.send_signal(number)
        out, err = self.popen.communicate(timeout=30)
        return self.popen.returncode, out, err


DRAIN = """\
await stop.wait()
print("draining", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_and_main_says_how_it_ended(number: signal.Signals) -> None:
    status, out, _ = Process(DRAIN + "print(stop.is_set())\nreturn 5").end(number)
    assert (status, out.splitlines()) == (5, ["draining", "True"])


def test_an_end_at_once_writes_what_was_logged() -> None:
    body = """\
import structlog, threading
threading.Thread(target=threading.Event().wait).start()  # Python itself would wait for it
structlog.get_logger("x").error("the last line")
end_at_once(70)
"""
    status, _, log = Process(body).end()
    assert status == 70 and "the last line" in log


def test_a_body_over_its_time_ends_the_process_and_one_within_goes_on() -> None:
    body = """\
import threading
with bounded(600.0, "nothing is stuck", 71):
    pass
for it in threading.enumerate():
    isinstance(it, threading.Timer) and it.join()  # which ends early, if it was called off
with bounded(0.05, "a copy is stuck", 70):
    time.sleep(60)  # on the loop itself
"""
    status, _, log = Process(body).end()
    assert status == 70 and "a copy is stuck" in log and "nothing" not in log


def test_a_second_signal_forces_and_cleanup_still_runs() -> None:
    rest = """\
import wire.process.lifetime
wire.process.lifetime.FORCE_S = 60.0
try:
    await asyncio.Event().wait()
finally:
    print("cleaned up", flush=True)
"""
    status, out, _ = Process(DRAIN + rest).end(signal.SIGTERM, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert "cleaned up" in out


# Signals are taken in the order in which they came.
HANG_UP = """\
taken = asyncio.Event()
asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, taken.set)
signal.raise_signal(signal.SIGHUP)
signal.raise_signal(signal.SIGUSR1)
await taken.wait()
"""


def test_a_terminal_that_is_closed_forces_nobody() -> None:
    assert Process(DRAIN + HANG_UP + "return 5").end(signal.SIGHUP)[0] == 5


def test_nohup_is_heeded() -> None:
    for hangup, has_stopped in (("SIG_IGN", 0), ("SIG_DFL", 1)):
        process = Process(HANG_UP + "return int(stop.is_set())", hangup)
        assert process.end()[0] == has_stopped


def test_a_main_that_will_not_be_cancelled_is_ended() -> None:
    rest = """\
import wire.process.lifetime
wire.process.lifetime.FORCE_S = 0.1
while True:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        pass
"""
    status, _, _ = Process(DRAIN + rest).end(signal.SIGTERM, signal.SIGINT)
    assert status == 128 + signal.SIGINT


def test_a_bad_configuration_is_one_line_and_78() -> None:
    status, _, err = Process("raise ConfigError('--model: no such directory: nowhere')").end()
    assert (status, err) == (78, "--model: no such directory: nowhere\n")


def test_a_bug_is_logged_and_1() -> None:
    status, out, err = Process("raise RuntimeError('a bug of ours')").end()
    assert status == 1
    assert "the process failed" in err and "RuntimeError" in err
    assert "a bug of ours" not in out + err, "it might repeat a prompt"


def test_a_crash_leaves_the_stacks() -> None:
    status, _, err = Process("import os; os.kill(os.getpid(), 6)\nreturn 0").end()
    assert status == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in err


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """systemd's end of the notify socket, at an abstract name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        name = f"baton-test-{os.getpid()}"
        receiver.bind("\0" + name)
        receiver.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        yield receiver


def test_threads_have_a_stack_of_one_size_everywhere() -> None:
    body = f"import threading\nreturn 0 if threading.stack_size() == {STACK_BYTES} else 1"
    assert Process(body).end()[0] == 0


def test_notify_reaches_an_abstract_socket(systemd: socket.socket) -> None:
    assert notify("READY=1", "STATUS=serving 12 req,\n31 % KV")
    assert systemd.recv(4096) == b"READY=1\nSTATUS=serving 12 req, 31 % KV"
    assert notify("STOPPING=1")
    assert systemd.recv(4096) == b"STOPPING=1"


def test_a_slow_start_asks_for_more_time(systemd: socket.socket) -> None:
    with slow_start("loading demo"):
        assert systemd.recv(100) == b"STATUS=loading demo"
        assert systemd.recv(100) == b"EXTEND_TIMEOUT_USEC=60000000"


@pytest.mark.parametrize("path", ["", "vsock:2:1234", "relative"])
def test_notify_without_systemd_does_nothing(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    assert not notify("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "period_s"),
    [
        ("", "", None),
        ("0", "", None),
        ("soon", "", None),
        ("15000000", "1", None),
        pytest.param("15000000", str(os.getpid()), 15.0, id="ours"),
    ],
)
def test_the_watchdog_is_ours_only(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str, period_s: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid)
    assert watchdog_s() == period_s


async def test_the_watchdog_is_fed_while_there_is_progress(
    monkeypatch: pytest.MonkeyPatch, systemd: socket.socket
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    answers = iter([True, False, False, True])
    asked = asyncio.Event()

    def is_alive() -> bool:
        answer = next(answers, None)
        if answer is None:
            asked.set()
        return bool(answer)

    feeding = asyncio.create_task(keep_watchdog(is_alive))
    await asked.wait()
    feeding.cancel()
    systemd.setblocking(False)
    assert [systemd.recv(4096) for _ in range(2)] == [b"WATCHDOG=1"] * 2
    with pytest.raises(BlockingIOError):
        systemd.recv(4096)
    monkeypatch.setenv("WATCHDOG_USEC", "")
    await keep_watchdog(is_alive)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_whose_standard_streams_are_closed_lives_and_ends_as_any(closed: str) -> None:
    program = (
        "import os, signal, socket, subprocess, sys\n"
        "from wire.process.lifetime import open_standard_streams, run\n"
        "from wire.process.log import configure\n"
        "open_standard_streams()\n"
        "configure()\n"
        "async def main(stop):\n"
        "    with socket.socket() as first:\n"
        "        assert first.fileno() > 2, first\n"
        "    sys.stderr.write('to stderr')\n"
        "    sys.stdout.write('to stdout')\n"
        "    child = 'import os; print([os.fstat(number) for number in range(3)])'\n"
        "    subprocess.run([sys.executable, '-c', child], check=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await stop.wait()\n"
        "    return 5\n"
        "sys.exit(run(main))\n"
    )
    command = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert ("to stdout" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))
    assert ("to stderr" in done.stderr) == ("2>&-" not in closed)
    assert "to stdout" not in done.stderr
