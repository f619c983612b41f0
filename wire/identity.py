"""The ZeroMQ identity of a worker, `role-rank-epoch`.  SPEC 2.1.

After the handshake, code compares parsed identities and never text prefixes: `prefill-10-7` starts
with `prefill-1`, but is another worker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from wire.errors import RemoteProtocolError
from wire.frames import NO_RANK, Role

MAX_EPOCH: Final = 2**64 - 1
# Each identity has one spelling (no leading zero, sign or space), so that equal identities have
# equal bytes.
_NAME: Final = re.compile(rb"(prefill|decode|any)-(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,19})")


@dataclass(frozen=True, slots=True)
class Identity:
    """One process of one rank.  `str()` is `role-rank`, the name that its CURVE key belongs to."""

    role: Role
    rank: int
    epoch: int

    @property
    def name(self) -> bytes:
        """The ZeroMQ routing id.  It has the epoch, so that a restarted worker is a new peer."""
        return f"{self}-{self.epoch}".encode()

    def __str__(self) -> str:
        return f"{self.role.name.lower()}-{self.rank}"

    @classmethod
    def parse(cls, name: bytes) -> Self:
        """Parse a routing id.  Raises RemoteProtocolError if it is not the id of a worker."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise RemoteProtocolError("the ZeroMQ identity is not <role>-<rank>-<epoch>")
        role, rank, epoch = Role[match[1].decode().upper()], int(match[2]), int(match[3])
        if rank >= NO_RANK or epoch > MAX_EPOCH:
            raise RemoteProtocolError("rank or epoch of the ZeroMQ identity is out of range")
        return cls(role, rank, epoch)


def is_of_party(name: bytes, party: str) -> bool:
    """Whether the owner of the CURVE key of `party` (a `role-rank`) may use this routing id."""
    try:
        return str(Identity.parse(name)) == party
    except RemoteProtocolError:
        return False
