"""A worker's ZeroMQ identity, `role-rank-epoch`, written and read in this one place.

Every layer behind the handshake compares identities, never their text: a prefix of the text says
nothing (`prefill-1` is how `prefill-10-7` begins).  SPEC 2.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from wire.errors import RemoteProtocolError
from wire.frames import NO_RANK, Role

MAX_EPOCH: Final = 2**64 - 1
# One spelling each, so that equal identities have equal bytes: no leading zero, no sign, no space.
_NAME: Final = re.compile(rb"(prefill|decode)-(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,19})")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process of which rank; `str()` is its party, whose key it must have."""

    role: Role
    rank: int
    epoch: int

    @property
    def name(self) -> bytes:
        """The ZeroMQ routing id: a restarted worker is another peer."""
        return f"{self}-{self.epoch}".encode()

    def __str__(self) -> str:
        return f"{self.role.name.lower()}-{self.rank}"

    @classmethod
    def parse(cls, name: bytes) -> Self:
        """Read a routing id.  Raises RemoteProtocolError: it is not that of a worker."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise RemoteProtocolError("the ZeroMQ identity is not <role>-<rank>-<epoch>")
        role, rank, epoch = Role[match[1].decode().upper()], int(match[2]), int(match[3])
        if rank >= NO_RANK or epoch > MAX_EPOCH:
            raise RemoteProtocolError("rank or epoch of the ZeroMQ identity is out of range")
        return cls(role, rank, epoch)


def is_of_party(name: bytes, party: str) -> bool:
    """Whether a routing id is one that the holder of this party's key may use."""
    try:
        return str(Identity.parse(name)) == party
    except RemoteProtocolError:
        return False
