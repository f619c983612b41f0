"""An OpenAI server whose responses are those of the test, right or wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import count
from typing import Any

from tests.router.command.serving import running

EVENTS = "text/event-stream"


def stream(*choices: tuple[list[int] | None, str | None], usage: int = 0) -> bytes:
    """Return the events of a response: token ids and the finish_reason of each, then the usage."""
    events: list[dict[str, Any]] = [
        {"choices": [{"token_ids": token_ids, "finish_reason": reason}]}
        for token_ids, reason in choices
    ]
    events += [{"choices": [], "usage": {"completion_tokens": usage}}] if usage else []
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


@contextmanager
def serving(
    respond: Callable[[int], bytes], status: int = 200, kind: str = EVENTS, models: Any = None
) -> Iterator[str]:
    """Answer completion number N, from 0, with `respond(N)`; yield the URL."""
    numbers = count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = {"data": [{"id": "one"}, {"id": "two"}]} if models is None else models
            self._send(200, "application/json", json.dumps(page).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._send(status, kind, respond(next(numbers)))

        def _send(self, code: int, content_type: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with running(Handler) as url:
        yield url
