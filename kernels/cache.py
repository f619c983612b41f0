"""Compiled code on disk for the next start: a file for each task, writable by its user alone.

What is read here runs as this process.  So the directory belongs to this user and is closed to all
others (mode 0700), as each file is: else nothing of it is read.  A file begins with a digest of the
rest: one that a power loss or a bad disk has damaged is named in the log, removed, and compiled
again.  A file is bytes and no pickle, and replaces the one before in one step.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EBADMSG, EPERM
from hashlib import blake2b
from pathlib import Path
from typing import Final

_LOG = logging.getLogger("kernels")
DIGEST_BYTES: Final = 32
_FOR_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def compiled_code() -> Path:
    """Return where compiled code is kept, by kind of device; the path may begin with ~."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "baton", "kernels")


class Directory:
    """Files that only this user can read and write; `opened` makes it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor  # names are looked up here, wherever `path` leads meanwhile

    def load(self, name: str, key: bytes) -> bytes | None:
        """Return what was saved under a name and a key; None if nothing was, or it is damaged."""
        try:
            content = self._read(name)
        except OSError:
            return None
        return content[DIGEST_BYTES:] if content[:DIGEST_BYTES] == key else None

    def save(self, name: str, key: bytes, content: bytes) -> None:
        """Save bytes under a name; call it in `locked`.

        Raises:
            OSError: There is no room, or the directory cannot be written to.
        """
        new = f"{name}.new"
        with suppress(FileNotFoundError):  # of a process that was killed
            os.unlink(new, dir_fd=self._descriptor)
        try:
            with open(new, "xb", opener=self._open) as file:
                file.write(digest_of(key + content) + key + content)
            os.replace(new, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=self._descriptor)
            raise

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Lock a name so that one process at a time saves it; remove a damaged file.

        Raises:
            OSError: The directory cannot be written to.
        """
        with open(f"{name}.lock", "wb", opener=self._open) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._read(name)
            except FileNotFoundError:
                pass
            except OSError as error:
                path = self._path / name
                _LOG.warning("removed %s (%s): it is compiled again", path, error.strerror)
                os.unlink(name, dir_fd=self._descriptor)
            yield

    def _read(self, name: str) -> bytes:
        """Return a key and what follows it.  Raises OSError if they are not as they were saved."""
        with open(name, "rb", opener=self._open) as file:
            _check_owner("it", os.fstat(file.fileno()))
            content = file.read()
        if content[:DIGEST_BYTES] != digest_of(content[DIGEST_BYTES:]):
            raise OSError(EBADMSG, "it is damaged")
        return content[DIGEST_BYTES:]

    def _open(self, name: str, flags: int) -> int:
        # A link may lead to a file that was not saved here; a FIFO would be waited for.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=self._descriptor)


@contextmanager
def opened(path: Path) -> Iterator[Directory]:
    """Open a directory of compiled code; make it, or close it to others, if need be.

    Raises:
        OSError: That cannot be, or it belongs to another user.
    """
    path.mkdir(0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        state = os.fstat(descriptor)
        if state.st_uid == os.geteuid() and state.st_mode & _FOR_OTHERS:
            os.fchmod(descriptor, stat.S_IRWXU)
            state = os.fstat(descriptor)
        _check_owner(str(path), state)
        yield Directory(path, descriptor)
    finally:
        os.close(descriptor)


def digest_of(content: bytes) -> bytes:
    """Return a digest of `DIGEST_BYTES`."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _check_owner(name: str, state: os.stat_result) -> None:
    if state.st_uid != os.geteuid():
        reason = f"{name} belongs to user {state.st_uid}, this process to user {os.geteuid()}"
        raise PermissionError(EPERM, reason)
    if state.st_mode & _FOR_OTHERS:
        raise PermissionError(EPERM, f"{name} is open to others: mode {state.st_mode & 0o777:o}")
