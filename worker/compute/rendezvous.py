"""Connects the processes of a model: they find each other, compare settings, and connect.

Process 0 listens at the rendezvous, and the others connect to it.  When all have connected and have
the same settings, they connect to each other.  A signal can interrupt the wait.  Afterwards no
process listens.  The rendezvous is one of these URLs:

    file:///PATH        a Unix socket for this user only; process 1 listens at PATH.1, and so on
    abstract://NAME     the same in Linux's abstract socket namespace, without files
    tcp://HOST:PORT     the port of process 0; the other processes listen at any free port
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, aclosing
from ipaddress import ip_address
from itertools import combinations
from typing import Any, Final, NamedTuple

from worker.compute.connection import Connection, ProcessLost, exchange
from worker.compute.handshake import Caller, Listener, Purpose, Refused, call
from worker.model.shard import Shard

Connections = dict[tuple[int, Purpose], Connection]
Settings = Mapping[str, object]

# The interval between connection attempts, and so the longest delay of a signal.
_RETRY_S: Final = 0.05
_LENGTH: Final = struct.Struct("<I")
MAX_MESSAGE_BYTES: Final = 1 << 20
_BACKLOG: Final = 128
_EVERYWHERE: Final = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


class Address(NamedTuple):
    family: socket.AddressFamily
    sockaddr: Any


def connect(
    rendezvous: str, shard: Shard, settings: Settings, timeout_s: float, secret: bytes = b""
) -> Connections:
    """Connect to all other processes; return the connections by peer and purpose.

    Args:
        rendezvous: A URL; see the module's docstring.
        settings: Settings that must be equal in all processes, by their names in error messages.
        secret: The shared secret of this worker's processes.  If it is empty, every peer that
            reaches a port is trusted, and messages are sent unencrypted.

    Raises:
        ValueError: Another process has this number, other settings or another secret.
        TimeoutError: A process did not connect in time.
        ProcessLost: A process that had connected died.
        OSError: This process cannot listen at its address.
    """
    return asyncio.run(_Rendezvous(rendezvous, shard, settings, timeout_s, secret).connect_all())


def other_connections(size: int, stages: int) -> list[Caller]:
    """Return all connections except the first one from each process to process 0.

    A shard all-reduces with the shards of its stage, and sends to its rank in the next stage.
    """
    shards = [Shard.of_process(it, size, stages) for it in range(size * stages)]
    found = list[Caller]()
    for called, caller in combinations(shards, 2):
        distance = abs(called.stage - caller.stage)
        if called.process == 0:
            purposes = [Purpose.COPIES, Purpose.WATCH]
        elif distance == 0 or (distance == 1 and called.rank == caller.rank):
            purposes = [Purpose.STEPS]
        else:
            purposes = []
        found += [Caller(caller.process, called.process, it) for it in purposes]
    return found


class _Rendezvous:
    def __init__(
        self, rendezvous: str, shard: Shard, settings: Settings, timeout_s: float, secret: bytes
    ) -> None:
        self._rendezvous, self._settings, self._secret = rendezvous, settings, secret
        self._number, self._count = shard.process, shard.size * shard.stages
        self._others = other_connections(shard.size, shard.stages)
        self._deadline = time.monotonic() + timeout_s
        self._is_sealed = bool(secret) and rendezvous.startswith("tcp://")
        self._connections: Connections = {}
        self._listening = ExitStack()

    async def connect_all(self) -> Connections:
        """Make all connections, or close them on failure; stop listening in either case."""
        try:
            with self._listening:
                await (self._run_follower() if self._number else self._run_leader())
        except BaseException:
            for connection in self._connections.values():
                connection.close()
            raise
        return self._connections

    async def _run_leader(self) -> None:
        """Run process 0: accept the others, compare settings, send all of them the addresses."""
        family, sockaddr = _resolve(self._rendezvous)
        # This machine's own name may resolve to loopback here, but not on the other machines.
        if family != socket.AF_UNIX and ip_address(sockaddr[0]).is_loopback:
            sockaddr = (_EVERYWHERE[family], *sockaddr[1:])
        listener, secret = self._listen(Address(family, sockaddr)), secrets.token_bytes()
        addresses: dict[int, Any] = {}

        def greet(other: Connection) -> None:
            theirs = self._receive(other)
            addresses[other.peer] = theirs["address"]
            self._send(other, {"settings": self._settings, "secret": secret.hex()})
            self._compare(theirs["settings"], other.peer)

        await self._admit(listener, [Caller(it, 0) for it in range(1, self._count)], greet)
        for other in self._connections.values():
            self._send(other, list(addresses.items()))
        listener.secret = secret
        await self._admit(listener, self._others)

    async def _run_follower(self) -> None:
        """Run a process other than 0: connect to lower numbers, then accept higher ones."""
        first = await self._call(Caller(self._number, 0), self._secret)
        family = first.socket.family
        if family == socket.AF_UNIX:
            own = Address(family, f"{_resolve(self._rendezvous).sockaddr}.{self._number}")
        else:
            host, _, *scope = first.socket.getsockname()
            own = Address(family, (host, 0, *scope))
        listener = self._listen(own)
        address = own.sockaddr if family == socket.AF_UNIX else listener.socket.getsockname()
        self._send(first, {"settings": self._settings, "address": address})
        theirs = self._receive(first)
        self._compare(theirs["settings"], 0)
        addresses = dict(self._receive(first))  # process 0 sends it after all have connected
        listener.secret = bytes.fromhex(theirs["secret"])
        for it in self._others:
            if it.caller == self._number:
                sockaddr = addresses.get(it.called)  # missing for process 0, at the rendezvous
                sockaddr = tuple(sockaddr) if isinstance(sockaddr, list) else sockaddr
                called = Address(family, sockaddr) if sockaddr else None
                await self._call(it, listener.secret, called)
        await self._admit(listener, self._others)

    async def _admit(
        self,
        listener: Listener,
        callers: Iterable[Caller],
        greet: Callable[[Connection], None] | None = None,
    ) -> None:
        """Wait for the connections that `callers` open to this process; pass each to `greet`."""
        listener.missing = {it for it in callers if it.called == self._number}
        try:
            async with asyncio.timeout(self._remaining_s()), aclosing(listener.admit()) as admitted:
                async for caller, connection in admitted:
                    self._connections[caller.caller, caller.purpose] = connection
                    if greet is not None:
                        greet(connection)
        except TimeoutError:
            number = min(listener.missing).caller
            raise self._timeout(f"process {number} of {self._count} has not come") from None

    async def _call(
        self, caller: Caller, secret: bytes, address: Address | None = None
    ) -> Connection:
        """Connect to a process at `address`, by default the rendezvous; retry until it listens."""
        while True:
            family, sockaddr = address or _resolve(self._rendezvous)
            sock = socket.socket(family)
            sock.setblocking(False)
            try:
                async with asyncio.timeout(max(_RETRY_S, self._remaining_s())):
                    await asyncio.get_running_loop().sock_connect(sock, sockaddr)
                connection = await call(sock, caller, secret, is_sealed=self._is_sealed)
                self._connections[caller.called, caller.purpose] = connection
                return connection
            except Refused as error:
                raise ValueError(f"--rendezvous {self._rendezvous}: {error}") from None
            except OSError:
                pass
            finally:
                if (caller.called, caller.purpose) not in self._connections:
                    sock.close()
            if self._remaining_s() <= 0:
                raise self._timeout(f"process {caller.called} is not there")
            await asyncio.sleep(_RETRY_S)

    def _listen(self, address: Address) -> Listener:
        family, sockaddr = address
        if family != socket.AF_UNIX:
            listening = socket.create_server(sockaddr, family=family, backlog=_BACKLOG)
            self._listening.enter_context(listening)
        else:
            listening = self._listening.enter_context(socket.socket(family))
            try:
                listening.bind(sockaddr)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise ValueError(
                    f"--rendezvous {self._rendezvous} is in use, or was used before; give each "
                    "worker and each start a new file, or a port of its own"
                ) from None
            if not sockaddr.startswith("\0"):
                self._listening.callback(os.unlink, sockaddr)
                os.chmod(sockaddr, 0o600)  # before `listen`, so no other user can connect
            listening.listen(_BACKLOG)
        return Listener(listening, self._secret, is_sealed=self._is_sealed)

    def _compare(self, theirs: Settings, other: int) -> None:
        for name, value in self._settings.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"the processes of one worker need the same settings: {name} is {value} for "
                    f"process {self._number} and {theirs.get(name)} for process {other}"
                )

    def _send(self, other: Connection, content: object) -> None:
        message = json.dumps(content).encode()
        for part in (_LENGTH.pack(len(message)), message):
            exchange([(other, part)], [], self._remaining_s())

    def _receive(self, other: Connection) -> Any:
        length = bytearray(_LENGTH.size)
        exchange([], [(other, memoryview(length))], self._remaining_s())
        (num_bytes,) = _LENGTH.unpack(length)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ProcessLost(f"process {other.peer} sent a message of {num_bytes} bytes")
        message = bytearray(num_bytes)
        exchange([], [(other, memoryview(message))], self._remaining_s())
        return json.loads(message)

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _timeout(self, problem: str) -> TimeoutError:
        return TimeoutError(
            f"{problem} to --rendezvous {self._rendezvous}; look into its log, or for it"
        )


def _resolve(rendezvous: str) -> Address:
    kind, _, location = rendezvous.partition("://")
    if kind != "tcp":
        return Address(socket.AF_UNIX, location if kind == "file" else f"\0{location}")
    host, _, port = location.rpartition(":")
    name = host.strip("[]"), int(port)
    family, *_, found = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)[0]
    return Address(family, found)
