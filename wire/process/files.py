"""Files that settings name: read without blocking, and read again when they change."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from wire.process.settings import ConfigError

_LOG = structlog.get_logger(__name__)
_T = TypeVar("_T", bound=Sized)


class WatchedFile(Generic[_T]):
    """The parsed content of a file; `refresh` parses again when the file has changed.

    While it cannot be read, it is tried each time: nothing about a file tells that there are
    descriptors again.  Meanwhile `trouble` says what is wrong, and `content` is what it was;
    `consequence`, what that means to users, is logged once.  Raises ConfigError: it cannot be read,
    or `parse` refuses it.
    """

    def __init__(self, path: Path, parse: Callable[[Path], _T], consequence: str) -> None:
        self.trouble = ""
        self._path, self._parse, self._consequence = path, parse, consequence
        self._version = _version_of(path)
        self.content = parse(path)

    def refresh(self) -> bool:
        """Read it again if there is a reason to; whether it was read."""
        version, trouble = _version_of(self._path), self.trouble
        if version == self._version and not trouble:
            return False
        self._version = version
        try:
            self.content, self.trouble = self._parse(self._path), ""
        except ConfigError as error:
            self.trouble = str(error)
            if self.trouble != trouble:
                _LOG.error(self._consequence, reason=self.trouble)
            return False
        _LOG.info("file read again", path=str(self._path), entries=len(self.content))
        return True


def read_file(path: Path, *, is_secret: bool) -> bytes:
    """Return the content of a regular file.  ConfigError also for a world-readable secret."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(
                    f"{path} is no regular file, which it has to be: it is read more than once"
                )
            # systemd's credentials are readable for a group, whose members are chosen by an ACL.
            if is_secret and mode & 0o007:
                raise ConfigError(
                    f"{path} is a secret that everybody here can read: chmod 600 {path}"
                )
            return file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def read_text(path: Path, *, is_secret: bool) -> str:
    """Return the text of a regular file, in ASCII.  Raises ConfigError."""
    try:
        return read_file(path, is_secret=is_secret).decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not plain text") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a FIFO, too, without waiting for who writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _version_of(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file or its mode; None while it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ctime_ns, status.st_size, status.st_ino
