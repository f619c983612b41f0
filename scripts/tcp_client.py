"""A raw TCP client for tests, scripts and benchmarks.  SPEC 2.2."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Final, Self

from wire.frames import Frame
from wire.parts import Buffer, Message
from wire.stream import StreamDecoder, encode

_CHUNK_BYTES: Final = 64 << 10


class Client:
    """One connection to a raw TCP server; iterate over it to receive messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = StreamDecoder()

    def send(self, frame: Frame, *payload: Buffer) -> None:
        """Send one message.  Call `drain` to limit how much is buffered."""
        self._writer.write(b"".join(encode(frame, *payload)))

    async def drain(self) -> None:
        """Wait until the write buffer has space.  Raises ConnectionError."""
        await self._writer.drain()

    async def next_message(self) -> Message | None:
        """Return the next message, or None at EOF.

        Raises:
            ConnectionError: The connection was lost.
            RemoteProtocolError: The server violated SPEC, or closed in the middle of a message.
        """
        while (message := self._decoder.next_message()) is None:
            chunk = await self._reader.read(_CHUNK_BYTES)
            if not chunk:
                self._decoder.receive_eof()
                return None
            self._decoder.receive(chunk)
        return message

    async def __aiter__(self) -> AsyncIterator[Message]:
        while (message := await self.next_message()) is not None:
            yield message

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass  # The server has closed it first.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


async def connect(host: str, port: int, tls: ssl.SSLContext | None = None) -> Client:
    """Connect to a raw TCP server, over TLS if `tls` is given.  Raises OSError."""
    return Client(*await asyncio.open_connection(host, port, ssl=tls))
