"""Facts about sockets: who listens on a port, whether an address is ours, who answers where."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

TIMEOUT_S: Final = 2.0
GREETING_BYTES: Final = 64
SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_LISTEN: Final = "0A"


class Holder(NamedTuple):
    """A process that listens on a port; `command` is the start of its command line."""

    pid: int
    command: str

    @property
    def is_baton(self) -> bool:
        """Whether it is a router or a worker."""
        return bool(re.search(r"-m (router|worker)|baton (router|serve|worker)", self.command))

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def holder(port: int, proc: Path = Path("/proc")) -> Holder | None:
    """Return the process that listens on a TCP port, None if unknown or of another user."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        with suppress(OSError):
            for line in (proc / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for directory in proc.glob("[0-9]*") if inodes else ():
        with suppress(OSError):
            if any(os.readlink(each) in inodes for each in (directory / "fd").iterdir()):
                words = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
                # Not all of it: flags of other programs may be secrets.
                return Holder(int(directory.name), " ".join(words[:4]).strip())
    return None


def try_bind(host: str, port: int) -> None:
    """Bind a port and give it back.  Raises OSError; `socket.gaierror` for an unknown host."""
    name = None if host == "*" else host
    family, kind, _, _, address = socket.getaddrinfo(
        name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(address)


def is_own(host: str) -> bool:
    """Whether an interface of this machine has the address.  Raises OSError for unknown names."""
    try:
        try_bind(host, 0)
    except socket.gaierror:
        raise
    except OSError:
        return False
    return True


def mechanism(host: str, port: int, timeout_s: float = TIMEOUT_S) -> str:
    """Return the security mechanism of a ZeroMQ socket: CURVE if it has keys, else NULL.

    Sends the first bytes of a greeting (ZMTP 3), which the socket answers with all of its own; one
    with keys would hang up if it was told that this side has none.

    Raises:
        OSError: Nobody is reached, or nobody answers in time.
        ValueError: It is no ZeroMQ socket.
    """
    received = b""
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.sendall(SIGNATURE + b"\x03")
        while len(received) < GREETING_BYTES and (more := connection.recv(GREETING_BYTES)):
            received += more
            if received[:1] != SIGNATURE[:1]:
                break
    if len(received) < GREETING_BYTES or received[9] != SIGNATURE[9]:
        raise ValueError("what answers there does not speak ZeroMQ")
    return received[12:32].rstrip(b"\0").decode("ascii", errors="replace")
