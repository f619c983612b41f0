"""TLS for clients: the certificate, and a bound on records without data.

A KeyUpdate of TLS 1.3 has 27 bytes, costs 24 us and a reply, and needs no API key.  So records are
counted by the lengths in their headers, which are not encrypted: a client that sends too many in a
row without data is cut off.  And only a few records are read at once: uvloop would read 256 KiB, 32
times in an iteration of the loop, which takes seconds.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import ssl
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import uvloop
import uvloop.loop

from wire.process.files import read_file
from wire.process.settings import ConfigError

# Records that may come in a row without data: of KeyUpdates these take 0.8 ms.
MOST_IDLE: Final = 32
# Records that are read at once, if they are as long as those before them, within these bounds.
NUM_AT_ONCE: Final = 8
LEAST_BYTES: Final = 256
MOST_BYTES: Final = 20 << 10  # a whole record, and the beginning of the next
# Type, version and length.  RFC 8446, 5.1.
HEADER_BYTES: Final = 5


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
    """Raise ConfigError that names a bad file and its problem: OpenSSL does not."""
    for path, what in ((cert, "CERTIFICATE"), (key, "PRIVATE KEY")):
        pem = read_file(path, is_secret=False)  # with comments in any encoding
        if f"{what}-----".encode() not in pem:
            raise ConfigError(f"{path} has no {what.lower()} in PEM (-----BEGIN {what}-----)")
    read_file(key, is_secret=True)


class Records:
    """Finds the records in what a client sends."""

    def __init__(self) -> None:
        self._num_left = 0  # bytes until the next record begins
        self._begun = b""  # what has come of its header

    def count(self, data: memoryview) -> int:
        """Return how many headers end in these bytes, which follow those of the last call."""
        come = self._begun + bytes(data) if self._begun else data
        num, at = 0, self._num_left
        while at + HEADER_BYTES <= len(come):
            at += HEADER_BYTES + int.from_bytes(come[at + 3 : at + HEADER_BYTES], "big")
            num += 1
        self._begun, self._num_left = bytes(come[at:]), max(at - len(come), 0)
        return num


class Opened:
    """The protocol above TLS: passes on what has been decrypted.

    `num_idle` records have come since the last data.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.num_idle = 0
        self._protocol = protocol
        self._transport: asyncio.Transport | None = None  # above TLS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The handshake is over."""
        self.num_idle, self._transport = 0, transport
        cast(Any, transport).set_read_buffer_limits(MOST_BYTES)  # of what nobody reads yet
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.num_idle = 0
        self._protocol.data_received(data)

    def note(self, num_records: int) -> None:
        """Count received records; whether they carry data is known once they are read."""
        if self._transport is None or self._transport.is_reading():
            self.num_idle += num_records


class Sealed(asyncio.BufferedProtocol):
    """The protocol below TLS: passes on what the loop reads, and counts the records in it."""

    def __init__(self, tls: asyncio.BufferedProtocol, opened: Opened) -> None:
        self._tls, self._opened = tls, opened
        self._records, self._num_bytes = Records(), LEAST_BYTES
        self._buffer: memoryview

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = cast(bytearray, self._tls.get_buffer(sizehint))
        self._buffer = memoryview(buffer)[: self._num_bytes]
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        num_records = self._records.count(self._buffer[:nbytes])
        self._opened.note(num_records)
        self._tls.buffer_updated(nbytes)
        if self._opened.num_idle > MOST_IDLE:
            self._transport.abort()
        wanted = NUM_AT_ONCE * nbytes // max(num_records, 1)
        self._num_bytes = max(LEAST_BYTES, min(wanted, 2 * self._num_bytes, MOST_BYTES))

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
    """Return `protocol` under TLS.  `shaken` gets the end of the handshake, or its error."""
    loop = asyncio.get_running_loop()
    make: Any = asyncio.sslproto.SSLProtocol
    if isinstance(loop, uvloop.Loop):
        make = uvloop.loop.SSLProtocol  # type: ignore[attr-defined]
    opened = Opened(protocol)
    tls = make(loop, opened, context, shaken, server_side=True, ssl_handshake_timeout=handshake_s)
    return Sealed(tls, opened)
