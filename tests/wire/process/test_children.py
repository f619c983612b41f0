"""Children import what we import, and on Linux do not outlive us, however we end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

import wire
from wire.process.children import die_with_parent, lives, same_release, signal_child, start_child
from wire.process.settings import EX_RESTART

ROOT = str(Path(wire.__file__).parents[1])
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux")
PARENT = """
import subprocess, sys
from wire.process.children import die_with_parent
child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent())
print(child.pid, flush=True)
sys.stdin.readline()
"""


async def test_a_child_has_no_terminal_and_no_descriptor_but_what_it_is_given() -> None:
    ours, theirs = os.pipe()
    os.set_inheritable(ours, False)
    script = "import os, sys; os.write(%d, b'%%d %%d' %% (os.getsid(0), len(sys.stdin.read())))"
    child = await start_child([sys.executable, "-c", script % theirs], os.environ, [theirs])
    os.close(theirs)
    assert await child.wait() == 0
    assert os.read(ours, 100) == b"%d 0" % child.pid, "it leads a session of its own"
    os.close(ours)


async def test_a_child_that_is_gone_takes_no_signal() -> None:
    child = await start_child([sys.executable, "-S", "-c", ""], os.environ)
    assert await child.wait() == 0
    signal_child(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("healthy_s", "pauses"),
    [(60.0, [0.01, 0.02, 0.03, 0.01, 0.02]), (-1.0, [0.01, 0.01, 0.01, 0.01, 0.01])],
)
async def test_a_child_is_restarted_after_pauses_that_grow_until_it_has_lived_long(
    monkeypatch: pytest.MonkeyPatch, healthy_s: float, pauses: list[float]
) -> None:
    monkeypatch.setattr("wire.process.children.MAX_PAUSE_S", 0.03)
    monkeypatch.setattr("wire.process.children.HEALTHY_S", healthy_s)
    ends: list[int | Exception] = [3, OSError("no descriptor left"), RuntimeError("no thread"), 0]

    async def run() -> int:
        end = ends[len(statuses) % len(ends)]
        if isinstance(end, Exception):
            raise end
        return end

    statuses: list[int] = []
    with capture_logs() as lines:
        async for status in lives(run, structlog.get_logger().bind(worker="x"), 0.01):
            statuses.append(status)
            if len(statuses) > len(pauses):
                break
    assert statuses == [3, 1, 1, 0, 3, 1]
    assert [line["restart_in_s"] for line in lines if "restart_in_s" in line] == pauses
    problems = [line["reason"] for line in lines if line["event"] == "cannot start child process"]
    assert problems == ["no descriptor left", "no thread", "no descriptor left"]
    assert {line["worker"] for line in lines} == {"x"}


async def test_a_child_that_was_asked_to_restart_does_so_at_once() -> None:
    async def run() -> int:
        return EX_RESTART

    statuses: list[int] = []
    with capture_logs() as lines:
        async for status in lives(run, structlog.get_logger(), 3600.0):
            statuses.append(status)
            if len(statuses) == 3:
                break
    assert [line["event"] for line in lines] == 2 * [
        "child process starts again, as it was asked to"
    ]


def test_a_child_imports_our_release(tmp_path: Path) -> None:
    """Though it starts somewhere else, where there is another package of that name."""
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "__init__.py").touch()
    environ = same_release({**os.environ, "PYTHONPATH": str(tmp_path)})
    command = [sys.executable, "-P", "-c", "import wire; print(wire.__file__)"]
    found = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, check=True)
    assert found.stdout.decode().strip() == wire.__file__


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ([], "0 0 0 0 kept"),
        (["-P"], "1 0 0 0 kept"),
        (["-s", "-OO", "-B"], "0 1 2 1 kept"),
        (["-I"], "1 1 0 0 None"),
        (["-P", "-OO", "PYTHONSAFEPATH=", "PYTHONOPTIMIZE=1"], "1 0 2 0 kept"),
    ],
)
def test_a_child_has_the_flags_of_our_interpreter(flags: list[str], found: str) -> None:
    """Whatever variables say less than they do."""
    said = dict(each.split("=") for each in flags if "=" in each)
    flags = [each for each in flags if "=" not in each]
    show = (
        "import os, sys; it = sys.flags; print(int(it.safe_path), it.no_user_site, it.optimize, "
        "it.dont_write_bytecode, os.environ.get('PYTHONKEPT'))"
    )
    ours = f"import sys; sys.path.insert(0, {ROOT!r})\n" + textwrap.dedent(f"""
        import os, subprocess
        from wire.process.children import same_release
        command = [sys.executable, "-c", {show!r}]
        subprocess.run(command, env=same_release(os.environ), check=True)
    """)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, *flags, "-c", ours],
        env=environ | {"PYTHONKEPT": "kept"} | said,
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.strip() == found


@LINUX
@pytest.mark.parametrize("is_killed", [True, False])
def test_no_child_outlives_its_parent(is_killed: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None and parent.stdout is not None
    with parent, parent.stdout as output:
        watched = os.pidfd_open(int(output.readline()))
        if is_killed:
            parent.kill()
        else:
            parent.stdin.close()
        readable, _, _ = select.select([watched], [], [], 30)
        os.close(watched)
    assert readable


@LINUX
def test_a_child_whose_parent_is_gone_already_ends() -> None:
    arrange = die_with_parent()
    assert arrange is not None
    pid = os.fork()
    if pid == 0:
        # Who asks here is no child of the process in which it was made ready.
        if os.fork() == 0:
            arrange()
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
