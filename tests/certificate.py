"""A certificate for 127.0.0.1, made when a test needs one, and a client that trusts it."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its key, and what trusts it."""

    cert: Path
    key: Path

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.cert))


def make(directory: Path) -> Certificate:
    """Make one with the openssl command."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=baton test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return Certificate(cert, key)


def deaf_client(made: Certificate, port: int, said: bytes) -> ssl.SSLSocket:
    """Connect, say something, and let next to nothing of the answer come.  It blocks."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    sealed = made.trust.wrap_socket(client, server_hostname="127.0.0.1")
    sealed.sendall(said)
    return sealed


def leave(client: ssl.SSLSocket, *, says_good_bye: bool) -> None:
    """End the client's side and keep the connection; a good-bye is close_notify."""
    client.setblocking(False)
    if says_good_bye:
        with contextlib.suppress(ssl.SSLError):
            client.unwrap()  # it is said, but what comes instead of an answer is none
    with socket.socket(fileno=os.dup(client.fileno())) as below:
        below.shutdown(socket.SHUT_WR)
