"""An HTTP server for one ASGI application, and a client that reads until it closes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from router.http.server import HttpServer, Limits


@asynccontextmanager
async def serving(
    app: object,
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    on_slow_client: Callable[[], object] = lambda: None,
) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, "127.0.0.1", 0, limits or Limits(), tls, on_slow_client=on_slow_client)
    task = asyncio.create_task(server.run_on_loop())
    try:
        yield server
    finally:
        server.should_exit = True
        await task


async def ask(server: HttpServer, data: bytes) -> bytes:
    """Send `data` and return everything until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()
