"""TLS for those who connect: its certificate, and how little of a client's bytes may be no data.

A record may cost far more than its bytes: a KeyUpdate of TLS 1.3 has 27, takes 24 us and a reply,
and any client may send as many as it likes, without an API key.  So only data buys a client more
bytes, and who has none left is cut off.  No more is read at once than a client has left: uvloop
would read 256 KiB, 32 times in a turn, and the loop would stand still for seconds.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import ssl
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import uvloop
import uvloop.loop

from wire.process.keys import read_text
from wire.process.settings import ConfigError

# The longest record of TLS 1.2 has 18 KiB (RFC 5246, 6.2.3), and its data is known only when all of
# it has come.  Of KeyUpdates these are 18 ms.
LEFT_BYTES: Final = 20 << 10
# What each byte of data buys.  A record with a single one has 23 bytes.
BOUGHT_BYTES: Final = 32


def server_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return TLS 1.2 or newer with this certificate chain and its key (PEM); None without them.

    Raises:
        ConfigError: A file is missing, unreadable, readable by everybody, or does not fit; the key
            is encrypted.
    """
    if cert is None or key is None:
        return None
    _check_pem(cert, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse() -> NoReturn:  # or else OpenSSL would ask on the terminal, and wait
        raise ConfigError(
            f"{key} is encrypted, and nobody can be asked for its password: openssl pkey -in {key} "
            "-out FILE writes one without"
        )

    try:
        context.load_cert_chain(cert, key, password=refuse)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"cannot use {cert} with {key}: {error.strerror or error}") from None
    return context


def _check_pem(cert: Path, key: Path) -> None:
    """Say in words what is wrong with a file, and with which: OpenSSL does not.

    Raises:
        ConfigError: It is.
    """
    for path, what in ((cert, "CERTIFICATE"), (key, "PRIVATE KEY")):
        try:
            pem = path.read_bytes()  # with comments in any encoding
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        if f"{what}-----".encode() not in pem:
            raise ConfigError(f"{path} has no {what.lower()} in PEM (-----BEGIN {what}-----)")
    read_text(key, is_secret=True)


class Opened:
    """Who is at the end of a connection, and is told what TLS makes of its bytes.

    `num_left` is how many bytes the client may send before it brings data again.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.num_left = LEFT_BYTES
        self._protocol = protocol
        self._transport: asyncio.Transport | None = None  # of what TLS has opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The handshake is over."""
        self.num_left, self._transport = LEFT_BYTES, transport
        # While nobody reads it, this much is kept.
        cast(Any, transport).set_read_buffer_limits(LEFT_BYTES)
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.num_left = min(self.num_left + BOUGHT_BYTES * len(data), LEFT_BYTES)
        self._protocol.data_received(data)

    def spend(self, num_bytes: int) -> None:
        """Bytes have come.  They do not count while they wait unread, and are few."""
        if self._transport is None or self._transport.is_reading():
            self.num_left -= num_bytes


class Sealed(asyncio.BufferedProtocol):
    """Passes on to TLS what the loop reads and says, until its client has no bytes left."""

    def __init__(self, tls: asyncio.BufferedProtocol, opened: Opened) -> None:
        self._tls, self._opened = tls, opened

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(cast(bytearray, self._tls.get_buffer(sizehint)))[: self._opened.num_left]

    def buffer_updated(self, nbytes: int) -> None:
        self._opened.spend(nbytes)
        self._tls.buffer_updated(nbytes)
        if self._opened.num_left <= 0:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._tls.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tls.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._tls.eof_received()

    def pause_writing(self) -> None:
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        self._tls.resume_writing()


def sealed_protocol(
    protocol: asyncio.Protocol,
    context: ssl.SSLContext,
    handshake_s: float,
    shaken: asyncio.Future[None],
) -> Sealed:
    """Return the protocol of a connection that speaks TLS, for who is at its end.

    `shaken` is done when the handshake is over, or has the error that ended it.
    """
    loop = asyncio.get_running_loop()
    make: Any = asyncio.sslproto.SSLProtocol
    if isinstance(loop, uvloop.Loop):
        make = uvloop.loop.SSLProtocol  # type: ignore[attr-defined]
    opened = Opened(protocol)
    tls = make(loop, opened, context, shaken, server_side=True, ssl_handshake_timeout=handshake_s)
    return Sealed(tls, opened)
