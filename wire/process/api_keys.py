"""The API keys of clients: a file with one key per line, reloaded when it changes.

Only digests are stored, and all are compared in constant time, so that neither memory nor timing
reveals a key.  Removing a line revokes its key from the next request on.  While the file is
unreadable, no key is valid.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Final

from wire.process.files import WatchedFile, read_text
from wire.process.keys import credential
from wire.process.settings import ConfigError, naming

MIN_CHARS: Final = 16
# Separates the cache salts of keys from other digests with the same key.
SALT_PURPOSE: Final = b"baton-cache-salt"
BEARER: Final = b"bearer "


class ApiKeys:
    """The API keys in the file `path`.  Raises ConfigError if it cannot be read.

    With `shares_prefixes`, requests of different keys share cached prefixes.  The keys of `beside`
    are valid too.
    """

    def __init__(
        self, path: Path, *, shares_prefixes: bool = False, beside: ApiKeys | None = None
    ) -> None:
        self._shares_prefixes = shares_prefixes
        self._beside = beside
        self._file = WatchedFile(path, _read, "no API key is valid now")

    def allow(self, given: bytes) -> bool:
        """Whether `given` is the digest of a valid key."""
        self._file.refresh()
        known = () if self._file.trouble else self._file.content
        matches = [hmac.compare_digest(given, each) for each in known]
        return any(matches) or (self._beside is not None and self._beside.allow(given))

    def cache_salt(self, key_digest: bytes, requested: str) -> str:
        """Return the cache salt of a request of this key, whose body sets the salt `requested`.

        Every router derives the same salt, so their prefixes are shared.  It reveals nothing of the
        key, because a keyed digest is one-way.
        """
        if self._shares_prefixes:
            return requested
        return hashlib.blake2b(
            requested.encode(), digest_size=32, key=key_digest, person=SALT_PURPOSE
        ).hexdigest()


def digest(key: bytes) -> bytes:
    """Return the digest of a key.  Keys are long and random, so no salt or stretching is needed."""
    return hashlib.sha256(key).digest()


def name_of(key_digest: bytes) -> str:
    """Return a name for a key in logs and queues, from the first digits of its digest."""
    return f"key-{key_digest.hex()[:12]}"


def bearer(header: bytes | None) -> bytes:
    """Return the bearer token of an Authorization header, b"" if there is none."""
    if header is None or header[: len(BEARER)].lower() != BEARER:
        return b""
    return header[len(BEARER) :].strip()


def open_api_keys(
    path: Path | None,
    name: str = "api_keys",
    *,
    shares_prefixes: bool = False,
    beside: ApiKeys | None = None,
) -> ApiKeys | None:
    """Load the keys from `path`, else from the systemd credential `name`, if there is one.

    Raises:
        ConfigError: They cannot be read.  The message begins with the flag of the setting `name`.
    """
    path = path or credential(name)
    if path is None:
        return None
    with naming(name):
        return ApiKeys(path, shares_prefixes=shares_prefixes, beside=beside)


def _read(path: Path) -> tuple[bytes, ...]:
    lines = [line.strip() for line in read_text(path, is_secret=True).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no API key: `baton keys --api-key {path}` adds one")
    if any(len(key) < MIN_CHARS for key in keys):
        raise ConfigError(f"{path} has a key of fewer than {MIN_CHARS} characters: make another")
    return tuple(digest(key.encode()) for key in keys)
