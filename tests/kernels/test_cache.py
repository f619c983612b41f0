"""Saved code is found again by its owner, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cache import digest_of, opened

ROOT = Path(__file__).resolve().parents[2]
KEY = digest_of(b"sources")
OTHER_KEY = digest_of(b"other sources")
NOBODY = 65534


def save(path: Path, content: bytes = b"code", key: bytes = KEY) -> None:
    with opened(path) as directory, directory.locked("norm"):
        directory.save("norm", key, content)


def load(path: Path, key: bytes = KEY) -> bytes | None:
    with opened(path) as directory:
        return directory.load("norm", key)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_was_saved_is_found_under_its_key_only(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    save(tmp_path)
    assert load(tmp_path) == b"code"
    assert load(tmp_path, OTHER_KEY) is None
    save(tmp_path, b"new code", OTHER_KEY)
    assert (load(tmp_path), load(tmp_path, OTHER_KEY)) == (None, b"new code")


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_no_other_user_can_read_or_write(tmp_path: Path, umask: int) -> None:
    path, before = tmp_path / "a" / "b", os.umask(umask)
    try:
        save(path)
    finally:
        os.umask(before)
    assert mode_of(path) == 0o700
    assert {mode_of(it) for it in path.iterdir()} == {0o600}


def test_a_directory_of_ours_is_closed_to_others_and_what_they_may_have_put_there_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path)
    tmp_path.chmod(0o777)
    (tmp_path / "norm").chmod(0o666)
    assert load(tmp_path) is None
    assert mode_of(tmp_path) == 0o700
    with opened(tmp_path) as directory, directory.locked("norm"):
        assert not (tmp_path / "norm").exists()
    assert f"removed {tmp_path}/norm (it is open to others: mode 666)" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_nothing_of_another_user_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path)
    os.chown(tmp_path / "norm", NOBODY, NOBODY)
    assert load(tmp_path) is None
    save(tmp_path)
    assert f"removed {tmp_path}/norm (it belongs to user {NOBODY}" in caplog.text
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=f"{tmp_path} belongs to user {NOBODY}"):
        load(tmp_path)


def test_no_link_is_followed(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "here"
    save(elsewhere)
    with opened(path):
        (path / "norm").symlink_to(elsewhere / "norm")
    assert load(path) is None
    save(path, b"new code")
    assert (load(path), load(elsewhere)) == (b"new code", b"code")
    (tmp_path / "link").symlink_to(elsewhere)
    with pytest.raises(OSError, match="link"):
        load(tmp_path / "link")


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("make", [make_fifo, Path.touch, lambda it: it.write_bytes(b"x" * 99)])
def test_what_was_not_saved_here_is_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    with opened(tmp_path):
        make(tmp_path / "norm")
    assert load(tmp_path) is None
    save(tmp_path)
    assert load(tmp_path) == b"code"


def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no room")

    save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no room"):
            save(tmp_path, b"new code")
    assert load(tmp_path) == b"code"
    assert {it.name for it in tmp_path.iterdir()} == {"norm", "norm.lock"}
    # A process that was killed meanwhile leaves a part of it.
    (tmp_path / "norm.new").write_bytes(b"ne")
    save(tmp_path, b"new code")
    assert load(tmp_path) == b"new code"
    assert {it.name for it in tmp_path.iterdir()} == {"norm", "norm.lock"}


SAVES = """
import sys
from pathlib import Path
from kernels.cache import digest_of, opened

for round in range(200):
    with opened(Path(sys.argv[1])) as directory:
        found = directory.load("norm", digest_of(b"sources"))
        assert found is None or len(set(found)) == 1, found
        with directory.locked("norm"):
            directory.save("norm", digest_of(b"sources"), sys.argv[2].encode() * 100_000)
"""


def test_processes_that_save_at_the_same_time_spoil_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    processes = [subprocess.Popen([*command, letter], cwd=ROOT) for letter in "ab"]
    assert [process.wait() for process in processes] == [0, 0]
    found = load(tmp_path)
    assert found in (b"a" * 100_000, b"b" * 100_000)
