"""Errors of the API: messages for clients, and their statuses.

Errors have the shape that OpenAI clients parse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from wire.errors import ErrorCode, WireError, shown

Header = tuple[bytes, bytes]

# Seconds after which the client should retry.
RETRY_AFTER_S: Final = 1
# An error lists at most so many wrong values.
MAX_LISTED: Final = 8

HTTP_STATUS: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.KV_TRANSFER_TOO_LARGE: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.DEADLINE_EXCEEDED: 408,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.NO_WORKER: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.WORKER_LOST: 503,
    ErrorCode.OUT_OF_BLOCKS: 503,
}


class HttpError(Exception):
    """The request is answered with an error.  `code` is a word that a program can test for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    @property
    def body(self) -> bytes:
        """The JSON object, for a response as for an event in the middle of a stream."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _type(self.status),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


# The body of an answer that is an error, with the id of its request: APIs have shapes of their own.
ErrorBody = Callable[[HttpError, str], bytes]


def openai_error(error: HttpError, request_id: str) -> bytes:
    """Return an error in OpenAI's shape; the id of the request is in the headers."""
    return error.body


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def http_error(error: WireError) -> HttpError:
    """Return the HTTP error for an error of the system.

    An error that is not in HTTP_STATUS is a fault of ours: the client is told its code alone.
    """
    status = HTTP_STATUS.get(error.code, 500)
    headers: tuple[Header, ...] = ()
    if status in (429, 503):
        headers = (retry_after(),)
    elif status == 408 or error.code is ErrorCode.MODEL_FAILED:
        # The deadline has passed, or the model cannot; clients that retry 408 and 500 by themselves
        # would only add load.
        headers = ((b"x-should-retry", b"false"),)
    message = error.message if status != 500 else f"the request failed: {error.code.label}"
    return HttpError(status, message, code=error.code.label, headers=headers)


def retry_after() -> Header:
    """Return the header of an error that may be over when the client asks again."""
    return b"retry-after", b"%d" % RETRY_AFTER_S


def invalid(param: str | None, problem: str) -> HttpError:
    """Return the 400 that names a field and what is wrong with it."""
    message = f"{param}: {problem}" if param else problem
    return HttpError(400, message, code="invalid_value", param=param)


def listed(sent: Sequence[str]) -> str:
    """List the first few of these values for an error message."""
    few = ", ".join([shown(each) for each in sent[:MAX_LISTED]])
    return few if len(sent) <= MAX_LISTED else f"{few} and {len(sent) - MAX_LISTED} more"
