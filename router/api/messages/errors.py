"""Errors in the format that Anthropic's clients parse.

The HTTP statuses are those of all other routes, even if Anthropic has its own (529 for 503):
proxies understand the standard ones, and clients retry after either.
"""

from __future__ import annotations

from typing import Final

import msgspec

from router.api.errors import HttpError, invalid
from wire.errors import ErrorCode, shown

# The supported API versions.  The later one only removes fields such as `temperature`; this server
# accepts them with either version, and answers are the same.
VERSIONS: Final = ("2023-06-01", "2026-10-21")
TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def message_error(error: HttpError, request_id: str) -> bytes:
    """Return the JSON object: the body of a response, or the data of an event in a stream.

    `error_code` is this server's error code, in the field where Anthropic's clients look for one.
    """
    message = error.message
    if error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED.label:
        # Agents match this text to find out that they must shorten the conversation.
        message = f"prompt is too long: {message}"
    details = {} if error.code is None else {"details": {"error_code": error.code}}
    kind = TYPES.get(error.status, "invalid_request_error")
    body = {"type": kind, "message": message} | details
    return msgspec.json.encode({"type": "error", "error": body, "request_id": request_id})


def check_version(given: bytes | None) -> None:
    """Refuse an unsupported API version; a missing version is accepted."""
    version = VERSIONS[0] if given is None else given.decode("latin-1")
    if version not in VERSIONS:
        known = " or ".join(VERSIONS)
        raise invalid("anthropic-version", f"{shown(version)} is not spoken here; send {known}")
