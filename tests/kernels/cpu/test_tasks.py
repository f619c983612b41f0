"""Arguments lie where their names say; what is compiled is kept on disk, and computes the same."""

from __future__ import annotations

import errno
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kernels.cache import Directory
from kernels.cpu import tasks, threads
from kernels.cpu.intrinsics import floats_at, longs_at
from kernels.cpu.tasks import (
    CACHE_LINE,
    Shared,
    allocate,
    compiled,
    free,
    layout_of,
    record_of,
    records_at,
)

ROOT = Path(__file__).resolve().parents[3]


class Arguments(NamedTuple):
    numbers: int
    factor: float
    is_negative: bool
    offset: np.float64
    taken: int = 0


class Turned(NamedTuple):
    numbers: int
    is_negative: bool
    factor: float
    offset: np.float64


def fill(a: Arguments, _thread: int) -> None:
    """Write each field as a float32."""
    numbers = floats_at(a.numbers)
    numbers[0], numbers[1], numbers[2] = a.factor, a.is_negative, a.offset
    numbers[3] = a.factor * numbers[3]


def filled() -> list[float]:
    numbers: npt.NDArray[np.float32] = np.full(4, 2, np.float32)
    arguments = record_of(Arguments(numbers.ctypes.data, 0.1, True, np.float64(-3)))
    threads.run(fill, arguments.ctypes.data, 1)
    return list(map(float, numbers))


WANT = [np.float32(0.1), 1.0, -3.0, np.float32(0.2)]


sources_of = tasks._sources  # noqa: SLF001
CACHES = compiled, threads.native, sources_of


@pytest.fixture
def _compiled_anew() -> Iterator[None]:
    for it in CACHES:
        it.cache_clear()
    yield
    for it in CACHES:
        it.cache_clear()


def test_a_loop_reads_fields_by_name() -> None:
    assert filled() == WANT


@dataclass
class Board:
    first: int
    gate: Shared
    second: int
    bell: Shared


def test_what_many_threads_write_has_a_cache_line_of_its_own() -> None:
    fields = layout_of(Board).fields
    assert fields is not None
    offsets = {name: field[1] for name, field in fields.items()}
    line = CACHE_LINE
    assert offsets == {"first": 0, "gate": line, "second": 2 * line, "bell": 3 * line}
    assert layout_of(Board).itemsize == 4 * line


class Unknown(NamedTuple):
    name: str


class Pair(NamedTuple):
    left: int
    right: int


pair_at = records_at(Pair)


def swap(a: Pair, _thread: int) -> None:
    other = pair_at(a.left)
    other.left, other.right = other.right, other.left


def test_a_record_is_changed_where_it_lies() -> None:
    pair = record_of(Pair(3, 4))
    threads.run(swap, record_of(Pair(pair.ctypes.data, 0)).ctypes.data, 1)
    assert pair.tolist() == [(4, 3)]


@pytest.mark.usefixtures("_compiled_anew")
def test_the_second_process_finds_it_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "inner.py").write_text("before")
    monkeypatch.setattr(tasks, "_SOURCES", tmp_path)
    assert compiled(fill).cache_hits == 0
    compiled.cache_clear()
    assert compiled(fill).cache_hits == 1
    assert filled() == WANT
    # Any source of the loops may have changed what was compiled from this one.
    compiled.cache_clear()
    sources_of.cache_clear()
    (tmp_path / "inner.py").write_text("after")
    assert compiled(fill).cache_hits == 0
    # So may the class of its arguments, wherever that is.
    compiled.cache_clear()
    monkeypatch.setitem(fill.__annotations__, "a", Turned)
    assert compiled(fill).cache_hits == 0


TOGETHER = """
import multiprocessing, os, signal, sys
from pathlib import Path
from kernels.cpu import tasks
from tests.kernels.cpu.test_tasks import fill

if sys.argv[1] == "damaged":
    if not os.fork():
        tasks.compiled(fill)
        os._exit(0)
    os.wait()
    files = [it for it in Path(os.environ["XDG_CACHE_HOME"]).rglob("*") if it.is_file()]
    assert any(it.stat().st_size for it in files)
    for path in files:
        path.write_bytes(b"")
heard, said = os.pipe()
first = os.fork()
if not first:
    tasks.CFunc._compile_uncached = lambda _: (os.write(said, b"."), signal.pause())
    tasks.compiled(fill)
os.read(heard, 1)  # now it compiles, for ever
all_are_there = multiprocessing.Barrier(4)
for _ in range(3):
    if not os.fork():
        all_are_there.wait()
        os.write(1, b"%d" % tasks.compiled(fill).cache_hits)
        os._exit(0)
all_are_there.wait()
os.kill(first, signal.SIGKILL)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


@pytest.mark.parametrize("found", ["nothing", "damaged"])
def test_one_process_compiles_and_the_others_wait_for_it_unless_it_dies(
    tmp_path: Path, found: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, found],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    assert sorted(done.stdout) == sorted(b"011")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")


def make_file(home: Path, _: pytest.MonkeyPatch) -> None:
    (home / "baton").touch()


def fill_disk(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "save", full)


def leave_home(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("XDG_CACHE_HOME")
    patch.setattr(os.path, "expanduser", lambda path: path)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (make_file, "(Not a directory)"),
        (fill_disk, "(No space left on device)"),
        (leave_home, "~/.cache/baton/kernels (Could not determine home directory.)"),
    ],
)
@pytest.mark.usefixtures("_compiled_anew")
def test_a_cache_that_cannot_be_written_is_done_without_and_said_once(
    break_it: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks.warn_not_cached.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    break_it(tmp_path, monkeypatch)
    for _ in range(2):
        assert filled() == WANT
        compiled.cache_clear()
        threads.native.cache_clear()
    (said,) = caplog.messages
    assert reason in said and "XDG_CACHE_HOME" in said


class RunsCode:
    """Pickled: unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._marker,)


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda content: random.Random(1).randbytes(len(content)),
        lambda content: content[: len(content) // 2],
        lambda content: content[:70],
        flip_a_bit,
        lambda _: pickle.dumps(RunsCode(Path(os.environ["XDG_CACHE_HOME"], "was unpickled"))),
    ],
    ids=["emptied", "random", "cut", "headless", "a bit", "pickle"],
)
@pytest.mark.usefixtures("_compiled_anew")
def test_a_damaged_file_is_named_removed_and_compiled_again(
    damage: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled(fill).cache_hits == 0
    files = [it for it in tmp_path.rglob("*") if it.is_file() and it.stat().st_size]
    for path in files:
        path.write_bytes(damage(path.read_bytes()))
    compiled.cache_clear()
    assert compiled(fill).cache_hits == 0
    assert filled() == WANT
    (said,) = caplog.messages
    assert any(f"removed {path} " in said for path in files) and "compiled again" in said
    compiled.cache_clear()
    assert compiled(fill).cache_hits == 1
    assert not (tmp_path / "was unpickled").exists()


COMPUTE = """
import torch
from kernels.cpu.program import Program
from kernels.cpu.rowwise import norm

x, out = torch.randn(2, 70, 577, generator=torch.Generator().manual_seed(1))
Program([norm(x, x[0], 1e-6, out)]).run()
print(out.numpy().tobytes().hex())
"""


def test_a_process_that_compiles_computes_what_one_does_that_finds_it_compiled(
    tmp_path: Path,
) -> None:
    # Two workers go on with one another's texts: they may not differ in a bit.
    outputs = [
        subprocess.run(
            [sys.executable, "-c", COMPUTE],
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]


class _Rooms(NamedTuple):
    num_rooms: int
    found: int  # where addresses go
    taken: int = 0


def _take_rooms(a: _Rooms, _thread: int) -> None:
    first = allocate(1000)
    longs_at(a.found)[0] = first
    longs_at(first)[0] = 7
    # In a loop, after which nobody names the first any more.
    for index in range(1, a.num_rooms):
        other = allocate(1000)
        longs_at(a.found)[index] = other
        longs_at(other)[0] = -1
        free(other)
    longs_at(a.found)[a.num_rooms] = longs_at(first)[0]
    free(first)


def test_memory_is_a_tasks_own_until_it_gives_it_back() -> None:
    found = np.zeros(6, np.int64)
    threads.run(_take_rooms, record_of(_Rooms(5, found.ctypes.data)).ctypes.data, 1)
    first, *others = found[:5].tolist()
    assert first % CACHE_LINE == 0 and first not in others
    assert found[5] == 7
