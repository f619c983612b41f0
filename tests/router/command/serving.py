"""Routers for tests of commands, which answer as the test says."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self

Row = dict[str, Any]
Respond = Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]


@contextmanager
def running(
    handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Run a server in a thread; yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True  # a connection that is kept open does not hold up the end
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(
    respond: Respond, *, date: str = "", tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Answer each request with a status and a body; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            status, content = respond(self)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            if status == 429:
                self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date or super().date_time_string(timestamp)

        def log_message(self, *_: object) -> None:
            pass

    with running(Handler, tls) as url:
        yield url


class Cluster:
    """GET /v1/cluster lists `rows`; a POST about a worker calls `on_ask(row)` and returns it."""

    def __init__(self, rows: list[Row], on_ask: Callable[[Row], object] = lambda row: None) -> None:
        self.rows, self.on_ask = rows, on_ask
        self.asked: list[str] = []
        self.keys: list[str | None] = []
        self.refusal = b""
        self.url = ""
        self._serving = serving(self._respond)

    def __enter__(self) -> Self:
        self.url = self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)

    def _respond(self, request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        self.keys.append(request.headers["authorization"])
        if request.command == "GET":
            return 200, json.dumps({"workers": self.rows}).encode()
        if self.refusal:
            return 403, self.refusal
        return 200, json.dumps(self.answer(request.path)).encode()

    def answer(self, path: str) -> object:
        self.asked.append(path)
        _, _, kind, name, *_ = path.split("/")
        if kind == "router":
            return {"status": "restarted"}
        row = next(row for row in self.rows if f"{row['role']}-{row['rank']}" == name)
        asked = {"worker": name, "epoch": row["epoch"], "placed": row["placed"]}
        self.on_ask(row)
        return asked
