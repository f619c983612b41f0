"""Errors of the API: HTTP statuses, and bodies in the format that OpenAI clients parse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from wire.errors import ErrorCode, WireError, shown

Header = tuple[bytes, bytes]

# Seconds after which the client should retry.
RETRY_AFTER_S: Final = 1
# The maximum number of invalid values that an error message lists.
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
    """An error response.  `code` is a machine-readable word, `param` the invalid field."""

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
        """The JSON object: the body of a response, or the data of an event in a stream."""
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


# Encodes an error and its request id in the format of one API.
ErrorBody = Callable[[HttpError, str], bytes]


def openai_error(error: HttpError, request_id: str) -> bytes:
    """Return an error in OpenAI's format, which sends the request id in the headers only."""
    return error.body


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def http_error(error: WireError) -> HttpError:
    """Convert an internal error to an HTTP error.

    An error that is not in HTTP_STATUS is a server fault: its message is not sent to the client.
    """
    status = HTTP_STATUS.get(error.code, 500)
    headers: tuple[Header, ...] = ()
    if status in (429, 503):
        headers = (retry_after(),)
    elif status == 408 or error.code is ErrorCode.MODEL_FAILED:
        # The deadline has passed, or the model failed: clients that retry 408 and 500 on their own
        # would only add load.
        headers = ((b"x-should-retry", b"false"),)
    message = error.message if status != 500 else f"the request failed: {error.code.label}"
    return HttpError(status, message, code=error.code.label, headers=headers)


def retry_after() -> Header:
    """Return the Retry-After header for a temporary error."""
    return b"retry-after", b"%d" % RETRY_AFTER_S


def invalid(param: str | None, problem: str) -> HttpError:
    """Return a 400 that names a field and its problem."""
    message = f"{param}: {problem}" if param else problem
    return HttpError(400, message, code="invalid_value", param=param)


def listed(sent: Sequence[str]) -> str:
    """Format the first few values as a list for an error message."""
    few = ", ".join([shown(each) for each in sent[:MAX_LISTED]])
    return few if len(sent) <= MAX_LISTED else f"{few} and {len(sent) - MAX_LISTED} more"
