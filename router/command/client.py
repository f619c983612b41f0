"""A client of one router over HTTP: JSON, and answers that are streamed as SSE.

Only the standard library, because the router itself needs no client.  Every request has a
connection of its own, and closing it early makes the router cancel the request.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from router.command.terminal import Failure

URL: Final = "http://127.0.0.1:8000"
# Until the first token a request may wait in the queue.
TIMEOUT_S: Final = 600.0
MAX_LINE: Final = 1 << 20
MAX_BODY: Final = 64 << 20
API_KEY: Final = "BATON_API_KEY"


class RequestError(Failure):
    """A request failed.  `status` is that of HTTP, 0 without one.

    `retry_after_s` is the router's Retry-After in seconds; None if it asks for no other attempt.
    """

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class Client:
    """Sends requests to the router at `url`, with an API key unless it is "".

    `timeout_s` is for connecting, and between two reads.  With the file of the router's own
    certificate, only that one is trusted, whatever host it names.

    Raises:
        RequestError: The URL is not http://HOST:PORT or https://HOST:PORT.
    """

    def __init__(
        self,
        url: str = URL,
        api_key: str = "",
        timeout_s: float = TIMEOUT_S,
        certificate: Path | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._certificate = certificate
        try:
            parts = urlsplit(self.url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise RequestError(f"--url {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not self._host or parts.path:
            raise RequestError(f"--url {url} is not http://HOST:PORT or https://HOST:PORT")
        self._is_tls = parts.scheme == "https"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of a response: to GET without a body, else to POST.

        Raises:
            RequestError: The router cannot be reached, or it answered with an error.
        """
        with self._response(path, body) as response:
            self._check(path, response)
            return json.loads(response.read(MAX_BODY))

    def read(self, path: str) -> bytes:
        """Return a response to GET as it came.  Raises RequestError as `call` does."""
        with self._response(path) as response:
            self._check(path, response)
            return response.read(MAX_BODY)

    def ask(self, path: str) -> tuple[str, Any]:
        """Return the Date and the JSON of a response to GET, even if it is an error.

        Raises:
            RequestError: The router cannot be reached, or the response is no JSON.
        """
        with self._response(path) as response:
            return response.getheader("date", ""), json.loads(response.read(MAX_BODY))

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the JSON of each event of a streamed answer.  Closing it cancels the request.

        Raises:
            RequestError: The router cannot be reached, it answered with an error, or the answer
                ended before it was complete.
        """
        with self._response(path, {**body, "stream": True}) as response:
            self._check(path, response)
            while line := response.readline(MAX_LINE):
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    _raise_error(event)
                    yield event
        raise RequestError("the router closed the connection before the end of the answer")

    @contextmanager
    def _response(self, path: str, body: dict[str, Any] | None = None) -> Iterator[HTTPResponse]:
        """Send a request and yield the response; errors while it is read are RequestError too."""
        content = None if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        try:
            with closing(self._connect()) as connection:
                connection.request(method, path, content, self._headers)
                with connection.getresponse() as response:
                    yield response
        except (OSError, HTTPException, ValueError) as error:
            raise self._failed(error) from error

    def _connect(self) -> HTTPConnection:
        if not self._is_tls:
            return HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        context = ssl.create_default_context(cafile=self._certificate)
        if self._certificate:  # then neither its host nor its issuer matters
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)

    def _check(self, path: str, response: HTTPResponse) -> None:
        if (status := response.status) < 400:
            return
        pause = response.getheader("retry-after", "")
        retry_after_s = float(pause) if pause.isdecimal() else None
        with suppress(ValueError):
            _raise_error(json.loads(response.read(MAX_LINE)), status, retry_after_s)
        raise RequestError(f"{self.url}{path} answered {status}", status, retry_after_s)

    def _failed(self, error: Exception) -> RequestError:
        if isinstance(error, ConnectionRefusedError):
            return RequestError(
                f"nothing listens at {self.url}: `baton serve` starts a router, and --url says "
                "where one is"
            )
        return RequestError(f"{self.url}: {error or type(error).__name__}")


def read_api_key(file: Path | None) -> str:
    """Return the API key: the first in `file`, or else the one in BATON_API_KEY, or "".

    Raises:
        RequestError: The file cannot be read, or has no key.
    """
    if file is None:
        return os.environ.get(API_KEY, "").strip()
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise RequestError(f"--api-key-file {file}: {error}") from None
    for line in lines:
        if line and not line.startswith("#"):
            return line
    raise RequestError(f"--api-key-file {file} has no key: write one on a line of its own")


def _raise_error(answer: object, status: int = 0, retry_after_s: float | None = None) -> None:
    """Raise RequestError if this is the JSON of an error."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        hint = f" (say it in {API_KEY}, or --api-key-file)" if status == 401 else ""
        raise RequestError(f"{error.get('message')}{hint}", status, retry_after_s)
