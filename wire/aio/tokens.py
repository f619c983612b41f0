"""Tokens: what opens a second connection, of a peer that is known by its first.

Who is known at a socket with CURVE tells a secret there and shows it at another socket, where it
then goes on under names of its own: its identity, a slash and a number.  A token opens one
connection and no other, so who reads it on its way, in plain, cannot use it.  SPEC 6.9.
"""

from __future__ import annotations

import re
import secrets
from hmac import compare_digest
from typing import Final

from wire.aio.port import Options, token_options, token_server_options

TOKEN_BYTES: Final = 32
_NAME: Final = re.compile(rb"([a-z]+-[0-9]+-[0-9]+)/[0-9]{1,10}")


def new_token() -> bytes:
    """Make a secret that opens one connection."""
    return secrets.token_bytes(TOKEN_BYTES)


def name_of(identity: bytes, number: int) -> bytes:
    """Return under which name the connection `number` of a peer is opened."""
    return b"%s/%d" % (identity, number)


def identity_of(name: bytes) -> bytes:
    """Return whose connection this is; empty for a name that is none."""
    found = _NAME.fullmatch(name)
    return b"" if found is None else found[1]


class Tokens:
    """Admits who shows the token that its peer told (a `wire.aio.zap.Door`).

    One connection a peer: what was opened with an earlier token is closed when another is told.
    """

    mechanism, secret = b"PLAIN", "token"
    options = token_server_options()

    def __init__(self) -> None:
        self._told: dict[bytes, bytes] = {}  # by identity; the last one, used or not
        self._unused: set[bytes] = set()  # identities
        self._inside: dict[bytes, str] = {}  # under which name

    def tell(self, peer: bytes, token: bytes) -> None:
        """Take what `peer` told over its first connection."""
        if not compare_digest(self._told.get(peer, b""), token):
            self.forget(peer)
            self._told[peer] = token
            self._unused.add(peer)

    def forget(self, peer: bytes) -> None:
        """Its first connection has ended: so does the second, and no other is opened."""
        self._told.pop(peer, None)
        self._unused.discard(peer)
        self._inside.pop(peer, None)

    def admit(self, credentials: list[bytes]) -> str:
        name, token = credentials
        peer = identity_of(name)
        if peer not in self._unused or not compare_digest(self._told[peer], token):
            return ""
        self._unused.remove(peer)
        self._inside[peer] = name.decode("ascii")
        return self._inside[peer]

    def is_known(self, name: str) -> bool:
        return self._inside.get(identity_of(name.encode())) == name

    def may_speak(self, name: str, peer: bytes) -> bool:
        return self.is_known(name) and name.encode() == peer

    def refresh(self) -> None:
        """Nothing is kept elsewhere."""

    def stranger(self) -> tuple[Options, list[bytes]]:
        shown = [name_of(b"prefill-0-0", 0), new_token()]
        return token_options(*shown), shown
