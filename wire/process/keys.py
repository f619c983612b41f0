"""CURVE key pairs, and the list of keys that may connect to our ZeroMQ sockets.

A directory has the files that a process needs (`baton keys` writes it):

    decode-3.key      the key pair of `decode-3`; only on the machine that runs it
    authorized_keys   one line per key, `PUBLIC NAME`; the same on every machine

The owner of a key, called a party, is `router` or `<role>-<rank>`; a key is valid for no other
name.  During key rotation a party may have several keys; connecting sides expect the first one.
The list is reloaded when the file changes, and removing a line revokes a key.  An invalid line is
ignored; if the list becomes unreadable, its last content stays valid.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from wire.process.files import WatchedFile, read_text
from wire.process.settings import ConfigError, naming

AUTHORIZED: Final = "authorized_keys"
# 32 bytes in Z85.  Z85 uses `#` too, so a comment starts with `# `, including the space.
_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME: Final = re.compile(r"router|(prefill|decode|any)-(0|[1-9][0-9]{0,9})")
_LOG: Final = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: str
    secret: str = field(repr=False)

    def text(self) -> str:
        """Return the content of a `.key` file."""
        return f"public {self.public}\nsecret {self.secret}\n"


class Keys:
    """The key pair of party `name` and authorized keys, from `directory`.  Raises ConfigError."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.pair = read_key_pair(directory / f"{name}.key")
        self._path = directory / AUTHORIZED
        self._list = WatchedFile(self._path, _read_parties, "the list of keys stays as it was")

    def party(self, public: str) -> str | None:
        """Return the party that owns a public key; None for an unknown key."""
        return self._list.content.get(public)

    def public_of(self, name: str) -> str:
        """Return the public key that the party `name` must use.  Raises ConfigError."""
        self.refresh()
        for public, party in self._list.content.items():
            if party == name:
                return public
        raise ConfigError(
            f"{self._path} has no key of {name}: copy here the list that baton keys added it to"
        )

    def refresh(self) -> bool:
        return self._list.refresh()


def is_party(name: str) -> bool:
    """Return whether `name` may own a key: `router`, or role and rank such as `decode-3`."""
    return _NAME.fullmatch(name) is not None


def read_key_pair(path: Path) -> KeyPair:
    """Read a `.key` file.  Raises ConfigError, whose message never quotes the content."""
    text = read_text(path, is_secret=True)
    lines = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    public, secret = lines.get("public", ""), lines.get("secret", "")
    if not (_KEY.fullmatch(public) and _KEY.fullmatch(secret)):
        raise ConfigError(f"{path} is no key file: make one with `baton keys`")
    return KeyPair(public, secret)


def credential(name: str) -> Path | None:
    """Return the path of the systemd credential `name` (LoadCredential=), None without one."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
    path = Path(directory) / name
    return path if directory and path.is_file() else None


def open_keys(directory: Path | None, name: str) -> Keys | None:
    """Load the keys for `name` from `directory`, else from systemd credentials, if any.

    Raises:
        ConfigError: They cannot be read.  The message begins with --keys.
    """
    if directory is None and (found := credential(f"{name}.key")) is not None:
        directory = found.parent
    if directory is None:
        return None
    with naming("keys"):
        return Keys(directory, name)


def _read_parties(path: Path) -> dict[str, str]:
    parties: dict[str, str] = {}
    for number, line in enumerate(read_text(path, is_secret=False).splitlines(), start=1):
        if not line.strip() or line.startswith("# "):
            continue
        public, _, name = line.strip().partition(" ")
        if _KEY.fullmatch(public) and is_party(name.strip()):
            parties[public] = name.strip()
        else:
            _LOG.error(
                "line ignored: it must be a public key and a name", path=str(path), line=number
            )
    return parties
