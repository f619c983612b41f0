"""Cache compiled code on disk for later starts, in one file per task that only its user can write.

Cached code runs in this process.  So the directory (mode 0700) and its files must belong to this
user and be closed to all others; otherwise nothing in it is read.  A file begins with a digest of
its content: a file damaged by a power loss or a bad disk is logged, removed and compiled again.  A
file contains plain bytes, no pickle, and is replaced atomically.
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
    """Return the path of the cache of compiled code, which may begin with ~."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "baton", "kernels")


class Directory:
    """A directory of files that only this user can read and write; open one with `opened`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor  # files are opened relative to it, even if `path` is replaced

    def load(self, name: str, key: bytes) -> bytes | None:
        """Return the content saved under this name and key, or None if it is missing or damaged."""
        try:
            content = self._read(name)
        except OSError:
            return None
        return content[DIGEST_BYTES:] if content[:DIGEST_BYTES] == key else None

    def save(self, name: str, key: bytes, content: bytes) -> None:
        """Write content under a name; call it inside `locked`.

        Raises:
            OSError: The disk is full, or the directory cannot be written to.
        """
        new = f"{name}.new"
        with suppress(FileNotFoundError):  # left by a process that was killed
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
        """Lock a name so that only one process at a time saves it; remove a damaged file first.

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
        """Return the key and the content.

        Raises:
            OSError: The file is missing, damaged, or open to other users.
        """
        with open(name, "rb", opener=self._open) as file:
            _check_owner("it", os.fstat(file.fileno()))
            content = file.read()
        if content[:DIGEST_BYTES] != digest_of(content[DIGEST_BYTES:]):
            raise OSError(EBADMSG, "it is damaged")
        return content[DIGEST_BYTES:]

    def _open(self, name: str, flags: int) -> int:
        # A symbolic link may lead to a file that was not saved here; opening a FIFO would block.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=self._descriptor)


@contextmanager
def opened(path: Path) -> Iterator[Directory]:
    """Open a directory of compiled code; create it, or close it to other users, if necessary.

    Raises:
        OSError: The directory cannot be created or closed to others, or belongs to another user.
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
    """Return a BLAKE2 digest of `DIGEST_BYTES` bytes."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _check_owner(name: str, state: os.stat_result) -> None:
    if state.st_uid != os.geteuid():
        reason = f"{name} belongs to user {state.st_uid}, this process to user {os.geteuid()}"
        raise PermissionError(EPERM, reason)
    if state.st_mode & _FOR_OTHERS:
        raise PermissionError(EPERM, f"{name} is open to others: mode {state.st_mode & 0o777:o}")
