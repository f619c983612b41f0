"""The status lines that processes send to systemd, received on a notify socket.

Each process that is started with NOTIFY_SOCKET set to `address` is known by its pid, which the
kernel adds to what it says.  Linux only: the address is no file, so nobody can delete it.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Final, Self

_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_SPACE: Final = socket.CMSG_SPACE(_CREDENTIALS.size)


class Statuses:
    """The last STATUS= of each process that says any; a thread listens."""

    def __init__(self) -> None:
        self._status_of: dict[int, str] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # the kernel finds a free name
        self._thread = threading.Thread(target=self._listen, name="statuses")

    @property
    def address(self) -> str:
        name: bytes = self._socket.getsockname()
        return "@" + name[1:].decode()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join()
        self._socket.close()

    def of(self, pid: int) -> str:
        """The last status line of this process; empty before the first."""
        return self._status_of.get(pid, "")

    def _listen(self) -> None:
        while True:
            said, extra, _, _ = self._socket.recvmsg(4096, _SPACE)
            if not said:
                return
            [(_, _, credentials)] = extra
            pid = _CREDENTIALS.unpack(credentials)[0]
            for line in said.decode().splitlines():
                if line.startswith("STATUS="):
                    self._status_of[pid] = line.removeprefix("STATUS=")
