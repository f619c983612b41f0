"""Reading files: contents, refusals, and when they are read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.scarce import no_descriptor_left
from wire.process.files import WatchedFile, read_file, read_text
from wire.process.settings import ConfigError


def lines(path: Path) -> list[str]:
    return read_text(path, is_secret=True).splitlines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one\n")
    path.chmod(0o600)
    return path


def test_a_file_is_read_again_when_it_has_changed_and_only_then(path: Path) -> None:
    watched = WatchedFile(path, lines, "as it was")
    path.write_text("one\ntwo\n")
    assert watched.refresh() and watched.content == ["one", "two"]
    assert not watched.refresh()


def test_a_file_that_changes_while_it_is_read_is_read_again(path: Path) -> None:
    later = ["two\n", "three\n"]

    def slowly(path: Path) -> list[str]:
        found = lines(path)
        path.write_text(later.pop(0) if later else "three\n")
        return found

    watched = WatchedFile(path, slowly, "as it was")
    assert watched.refresh() and watched.content == ["two"]
    assert watched.refresh() and watched.content == ["three"]


def test_a_file_is_read_as_soon_as_its_mode_is_mended(path: Path) -> None:
    watched = WatchedFile(path, lines, "as it was")
    path.write_text("two\n")
    path.chmod(0o644)
    with capture_logs() as logs:
        assert not watched.refresh() and not watched.refresh()
    assert "chmod 600" in watched.trouble and watched.content == ["one"]
    assert [(each["event"], each["reason"]) for each in logs] == [("as it was", watched.trouble)]
    path.chmod(0o600)
    with capture_logs() as logs:
        assert watched.refresh() and (watched.content, watched.trouble) == (["two"], "")
    # How many there are, and never what they are.
    assert [(each["event"], each["entries"]) for each in logs] == [("file read again", 1)]


def test_a_file_is_read_as_soon_as_there_is_a_descriptor_for_it(path: Path) -> None:
    watched = WatchedFile(path, lines, "as it was")
    path.write_text("two\n")
    with no_descriptor_left():
        assert not watched.refresh() and "Too many open files" in watched.trouble
    assert watched.refresh() and watched.content == ["two"]


def test_each_trouble_is_said_once(path: Path) -> None:
    watched = WatchedFile(path, lines, "as it was")
    with capture_logs() as logs:
        path.unlink()
        assert not watched.refresh() and not watched.refresh()
        path.symlink_to(".")
        assert not watched.refresh() and not watched.refresh()
    reasons = [each["reason"].rpartition(": ")[2] for each in logs]
    assert reasons == ["No such file or directory", "Is a directory"]


def test_a_file_that_cannot_be_read_at_first_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cannot read .*/none: No such file or directory$"):
        WatchedFile(tmp_path / "none", lines, "as it was")


def test_a_directory_given_as_a_secret_is_refused_as_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"^cannot read .*: Is a directory$"):
        read_file(tmp_path, is_secret=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fifo_or_device_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    for path in (fifo, Path("/dev/null")):
        with pytest.raises(ConfigError, match=rf"^{path} is no regular file"):
            read_file(path, is_secret=False)


def test_a_secret_may_be_readable_by_its_group_only(path: Path) -> None:
    path.chmod(0o640)
    assert read_file(path, is_secret=True) == b"one\n"
    for mode in (0o601, 0o602, 0o604):
        path.chmod(mode)
        assert read_file(path, is_secret=False) == b"one\n"
        with pytest.raises(ConfigError, match=f"everybody here can read: chmod 600 {path}"):
            read_file(path, is_secret=True)


def test_content_that_is_not_ascii_is_not_shown(path: Path) -> None:
    path.write_text("café")
    with pytest.raises(ConfigError, match=r"file is not plain text$"):
        read_text(path, is_secret=True)
