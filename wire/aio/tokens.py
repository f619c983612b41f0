"""Tokens: what opens a second connection, of a peer that is known by its first.

A peer sends a secret, its token, over a socket with CURVE, and shows it when it connects to another
socket.  Its name there is its identity, a slash and a number.  A token opens one connection and no
other, so whoever reads it on its way, in plain, cannot use it.  SPEC 6.9.
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
    """Admits who shows the last token that its peer sent (a `wire.aio.zap.Door`).

    One connection a peer: what was opened with an earlier token is closed when another is sent.
    """

    mechanism, secret = b"PLAIN", "token"
    options = token_server_options()

    def __init__(self) -> None:
        # By identity: the last token, and the name that used it, b"" for none yet.
        self._expected: dict[bytes, tuple[bytes, bytes]] = {}

    def expect(self, peer: bytes, token: bytes) -> None:
        """Take what `peer` sent over its first connection."""
        last, _ = self._expected.get(peer, (b"", b""))
        if not compare_digest(last, token):
            self._expected[peer] = token, b""

    def forget(self, peer: bytes) -> None:
        """Its first connection has ended: so does the second, and no other is opened."""
        self._expected.pop(peer, None)

    def admit(self, credentials: list[bytes]) -> str:
        name, token = credentials
        peer = identity_of(name)
        last, used_by = self._expected.get(peer, (b"", b""))
        if not last or used_by or not compare_digest(last, token):
            return ""
        self._expected[peer] = last, name
        return name.decode("ascii")

    def may_speak(self, name: str, peer: bytes) -> bool:
        _, used_by = self._expected.get(identity_of(peer), (b"", b""))
        return bool(peer) and peer == used_by == name.encode()

    def refresh(self) -> None:
        """Nothing is kept elsewhere."""

    def stranger(self) -> Options:
        return token_options(name_of(b"prefill-0-0", 0), new_token())
