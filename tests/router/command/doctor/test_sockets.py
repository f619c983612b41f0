"""Facts about sockets, from real ones."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import zmq

from router.command.doctor.sockets import (
    GREETING_BYTES,
    SIGNATURE,
    Holder,
    holder,
    is_own,
    mechanism,
    try_bind,
)
from tests.cluster import START_S
from wire.aio.port import new_key_pair


def replying(content: bytes) -> int:
    """Send this to the first connection; return the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def reply() -> None:
        with server, server.accept()[0] as connection:
            connection.recv(GREETING_BYTES)
            connection.sendall(content)

    threading.Thread(target=reply).start()
    return int(server.getsockname()[1])


def test_the_process_that_listens_on_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = holder(port)
        assert found is not None and found.pid == os.getpid() and not found.is_baton
        with pytest.raises(OSError, match="in use"):
            try_bind("127.0.0.1", port)
    assert holder(port) is None
    try_bind("*", port)


@pytest.mark.parametrize(
    "command",
    ["python -m router --local 1,1", "python -m worker", "bin/python bin/baton serve --local 1"],
)
def test_processes_of_baton_are_known_by_their_commands(command: str) -> None:
    assert Holder(1, command).is_baton and not Holder(1, "nginx").is_baton


def test_the_addresses_of_this_machine() -> None:
    assert is_own("127.0.0.1") and is_own("localhost") and not is_own("192.0.2.7")
    with pytest.raises(socket.gaierror):
        is_own("nothing.invalid")


def test_whether_a_zeromq_socket_has_keys() -> None:
    pair = new_key_pair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as plain:
        port = plain.bind_to_random_port("tcp://127.0.0.1")
        assert mechanism("127.0.0.1", port, START_S) == "NULL"
        with context.socket(zmq.ROUTER) as guarded:
            guarded.curve_server = True
            guarded.curve_publickey = pair.public.encode()
            guarded.curve_secretkey = pair.secret.encode()
            port = guarded.bind_to_random_port("tcp://127.0.0.1")
            assert mechanism("127.0.0.1", port, START_S) == "CURVE"


@pytest.mark.parametrize("content", [b"HTTP/1.1 400 Bad Request\r\n\r\n", SIGNATURE + b"\x03\x01"])
def test_what_does_not_speak_zeromq(content: bytes) -> None:
    with pytest.raises(ValueError, match="does not speak ZeroMQ"):
        mechanism("127.0.0.1", replying(content), START_S)


def test_nobody_answers_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        mechanism("127.0.0.1", server.getsockname()[1], timeout_s=0.01)
