"""The API keys of clients: a file with one key a line, read again when it changes.

Only digests are kept, and all are compared in constant time, so that neither memory nor timing
reveals a key.  Removing a line revokes a key from the next request on.  An unreadable file admits
nobody.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Final

from wire.process.files import WatchedFile, read_text
from wire.process.keys import credential
from wire.process.settings import ConfigError

MIN_CHARS: Final = 16
BEARER: Final = b"bearer "


class ApiKeys:
    """The keys in `path`.  Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._file = WatchedFile(path, _read, "no API key is valid now")

    def allow(self, given: bytes) -> bool:
        """Whether this is the digest of a key."""
        self._file.refresh()
        known = () if self._file.trouble else self._file.content
        matches = [hmac.compare_digest(given, each) for each in known]
        return any(matches)


def digest(key: bytes) -> bytes:
    """Return what is kept of a key.  Keys are random and long: no salt, no stretching."""
    return hashlib.sha256(key).digest()


def name_of(key_digest: bytes) -> str:
    """Return what a key is called in logs and queues: enough of its digest to tell it apart."""
    return f"key-{key_digest.hex()[:12]}"


def bearer(header: bytes | None) -> bytes:
    """Return the key of an Authorization header, b"" without one."""
    if header is None or header[: len(BEARER)].lower() != BEARER:
        return b""
    return header[len(BEARER) :].strip()


def open_api_keys(path: Path | None) -> ApiKeys | None:
    """Return the configured keys: from `path`, else from the credential `api_keys`."""
    path = path or credential("api_keys")
    return None if path is None else ApiKeys(path)


def _read(path: Path) -> tuple[bytes, ...]:
    lines = [line.strip() for line in read_text(path, is_secret=True).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no API key: scripts/keys --api-key {path} adds one")
    if any(len(key) < MIN_CHARS for key in keys):
        raise ConfigError(f"{path} has a key of fewer than {MIN_CHARS} characters: make another")
    return tuple(digest(key.encode()) for key in keys)
