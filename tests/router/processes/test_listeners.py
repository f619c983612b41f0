"""Listening sockets cross a Unix socket, and clients find one queue behind all copies."""

from __future__ import annotations

import os
import socket

import pytest

from router.processes.listeners import Listeners, receive


def test_a_connection_waits_while_the_socket_changes_hands() -> None:
    ours, theirs = socket.socketpair()
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    addresses = [server.getsockname() for server in servers]
    with ours, theirs:
        Listeners(*[server.fileno() for server in servers]).send(ours)
        clients = [socket.create_connection(address) for address in addresses]
        for server in servers:
            server.close()
        received = receive(theirs)
        assert not any(map(os.get_inheritable, received))
        with pytest.raises(OSError):
            receive(theirs)  # there is nothing more
    for descriptor, client in zip(received.copy(), clients, strict=True):
        with socket.socket(fileno=descriptor) as server, client:
            accepted, address = server.accept()
            assert address == client.getsockname()
            accepted.close()
    received.close()


def test_another_number_of_sockets_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"L"], [])
        with pytest.raises(OSError, match="0 descriptors"):
            receive(theirs)
