"""Errors in the form that Anthropic's clients parse.

The statuses are those of every route, also where Anthropic has one of its own (529 for 503):
proxies know these, and clients retry after either.
"""

from __future__ import annotations

from typing import Final

import msgspec

from router.api.errors import HttpError, invalid
from wire.errors import ErrorCode, shown

# The versions of the API that are spoken here.  The later one only takes less, such as no
# `temperature`: here it takes as much as the earlier one, and answers are the same.
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
    """Return the JSON object, for a response as for an event in the middle of a stream.

    `error_code` is our own word for what happened, where Anthropic's clients look for one.
    """
    message = error.message
    if error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED.label:
        # By these words agents know that they have to shorten the conversation.
        message = f"prompt is too long: {message}"
    details = {} if error.code is None else {"details": {"error_code": error.code}}
    said = {"type": TYPES.get(error.status, "invalid_request_error"), "message": message} | details
    return msgspec.json.encode({"type": "error", "error": said, "request_id": request_id})


def check_version(given: bytes | None) -> None:
    """Refuse an unsupported version of the API; no version means a supported one."""
    version = VERSIONS[0] if given is None else given.decode("latin-1")
    if version not in VERSIONS:
        known = " or ".join(VERSIONS)
        raise invalid("anthropic-version", f"{shown(version)} is not spoken here; send {known}")
