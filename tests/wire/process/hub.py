"""A hub with one model, as `huggingface_hub` asks for it over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

REVISION = "0" * 40
PIECE = 1 << 20


@contextmanager
def hub(files: dict[str, bytes]) -> Iterator[str]:
    """Serve the files of every model; yield the address for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            name = self.path.rpartition("/")[2].partition("?")[0]
            if "/resolve/" in self.path:
                body = files.get(name, b"")
            elif "/tree/" in self.path:
                rows = [_row(path, content) for path, content in files.items()]
                body = json.dumps(rows).encode()
            else:
                siblings = [{"rfilename": path} for path in files]
                model = {"id": "org/name", "sha": REVISION, "siblings": siblings}
                body = json.dumps(model).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{sha256(body).hexdigest()}"')
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _row(path: str, content: bytes) -> dict[str, object]:
    oid = sha256(content).hexdigest()[:40]
    return {"type": "file", "path": path, "size": len(content), "oid": oid}
