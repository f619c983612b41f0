"""TLS for clients: loads the certificate, and limits TLS records without data.

A client without an API key can send TLS 1.3 KeyUpdate records, which have 27 bytes but cost 24 us
and a reply each.  So records are counted by their unencrypted headers, and a client that sends too
many in a row without data is disconnected.  Only a few records are read at a time, because uvloop
would read up to 32 x 256 KiB per iteration of the event loop, and block for seconds.
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

# Limit for consecutive records without data.  This many KeyUpdates take 0.8 ms.
MOST_IDLE: Final = 32
# Number of records to read at a time, estimated from the size of the previous ones, and the limits
# of a read in bytes.
NUM_AT_ONCE: Final = 8
LEAST_BYTES: Final = 256
MOST_BYTES: Final = 20 << 10  # more than the longest record
# Type, version and length of a record.  RFC 8446, 5.1.
HEADER_BYTES: Final = 5


def server_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return a server context for TLS 1.2 or newer, with a PEM certificate chain and key.

    Returns None without certificate or key.

    Raises:
        ConfigError: A file is missing or unreadable, the key is world-readable or encrypted, or
            certificate and key do not match.
    """
    if cert is None or key is None:
        return None
    _check_pem(cert, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse() -> NoReturn:  # otherwise OpenSSL would prompt for a password on the terminal
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
    """Raise ConfigError for a file that is not PEM; OpenSSL's error would not name the file."""
    for path, what in ((cert, "CERTIFICATE"), (key, "PRIVATE KEY")):
        pem = read_file(path, is_secret=False)  # bytes: comments may have any encoding
        if f"{what}-----".encode() not in pem:
            raise ConfigError(f"{path} has no {what.lower()} in PEM (-----BEGIN {what}-----)")
    read_file(key, is_secret=True)


class Records:
    """Counts the TLS records in a client's byte stream."""

    def __init__(self) -> None:
        self._num_left = 0  # bytes until the next record begins
        self._begun = b""  # the bytes received so far of an incomplete header

    def count(self, data: memoryview) -> int:
        """Return the number of record headers completed by the next bytes of the stream."""
        received = self._begun + bytes(data) if self._begun else data
        num, offset = 0, self._num_left
        while (end := offset + HEADER_BYTES) <= len(received):
            offset = end + int.from_bytes(received[offset + 3 : end], "big")
            num += 1
        self._begun, self._num_left = bytes(received[offset:]), max(offset - len(received), 0)
        return num


class Opened:
    """The protocol above TLS: passes decrypted data to the application's protocol.

    `num_idle` is the number of records received since the last data.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.num_idle = 0
        self._protocol = protocol
        self._transport: asyncio.Transport | None = None  # above TLS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Connect the application's protocol, after the handshake."""
        self.num_idle, self._transport = 0, transport
        cast(Any, transport).set_read_buffer_limits(MOST_BYTES)  # while reading is paused
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.num_idle = 0
        self._protocol.data_received(data)

    def note(self, num_records: int) -> None:
        """Count received records, unless reading is paused: then they are not decrypted yet."""
        if self._transport is None or self._transport.is_reading():
            self.num_idle += num_records


class Sealed(asyncio.BufferedProtocol):
    """The protocol below TLS: passes received bytes to TLS, and counts the records in them."""

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
    """Wrap `protocol` in TLS.  The future `shaken` completes with the handshake, or its error."""
    loop = asyncio.get_running_loop()
    make: Any = asyncio.sslproto.SSLProtocol
    if isinstance(loop, uvloop.Loop):
        make = uvloop.loop.SSLProtocol  # type: ignore[attr-defined]
    opened = Opened(protocol)
    tls = make(loop, opened, context, shaken, server_side=True, ssl_handshake_timeout=handshake_s)
    return Sealed(tls, opened)
