"""Read files named in settings without blocking, and reload them when they change."""

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
    """The parsed content of a file, which `refresh` reloads when the file has changed.

    If reloading fails, `trouble` has the error message, `content` keeps its last value, and
    `consequence` (what the failure means for users) is logged once.  `refresh` then retries at each
    call, even if the file has not changed: the process may have run out of file descriptors.

    Raises:
        ConfigError: At construction, the file cannot be read, or `parse` rejects it.
    """

    def __init__(self, path: Path, parse: Callable[[Path], _T], consequence: str) -> None:
        self.trouble = ""
        self._path, self._parse, self._consequence = path, parse, consequence
        self._version = _version_of(path)
        self.content = parse(path)

    def refresh(self) -> bool:
        """Reload the file if it has changed or the last attempt failed; return whether it did."""
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
    """Read a regular file.  Raises ConfigError, also for a world-readable secret."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(
                    f"{path} is no regular file, which it has to be: it is read more than once"
                )
            # Group bits are not checked: systemd's credentials use them for an ACL.
            if is_secret and mode & 0o007:
                raise ConfigError(
                    f"{path} is a secret that everybody here can read: chmod 600 {path}"
                )
            return file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def read_text(path: Path, *, is_secret: bool) -> str:
    """Read a regular file as ASCII text.  Raises ConfigError."""
    try:
        return read_file(path, is_secret=is_secret).decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not plain text") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking, as a FIFO without a writer would."""
    return os.open(path, flags | os.O_NONBLOCK)


def _version_of(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file or its mode; None if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ctime_ns, status.st_size, status.st_ino
