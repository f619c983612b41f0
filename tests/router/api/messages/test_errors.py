"""Errors in Anthropic's shape."""

from __future__ import annotations

import json

import pytest

from router.api.errors import HTTP_STATUS, HttpError, http_error
from router.api.messages.errors import TYPES, check_version, message_error
from wire.errors import ErrorCode, WireError


@pytest.mark.parametrize(
    ("status", "kind"),
    [*TYPES.items(), (400, "invalid_request_error"), (405, "invalid_request_error")],
)
def test_the_type_of_each_status(status: int, kind: str) -> None:
    body = json.loads(message_error(HttpError(status, "why"), "req-1"))
    assert body == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
        "request_id": "req-1",
    }


@pytest.mark.parametrize("code", HTTP_STATUS)
def test_our_word_for_it_is_where_clients_look_for_one(code: ErrorCode) -> None:
    error = json.loads(message_error(http_error(WireError(code, "why")), "1"))["error"]
    assert error["details"] == {"error_code": code.label}
    assert error["message"].endswith("why")


def test_agents_know_a_prompt_that_is_too_long() -> None:
    error = http_error(WireError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "it has 9 tokens"))
    said = json.loads(message_error(error, "1"))["error"]["message"]
    assert said == "prompt is too long: it has 9 tokens"


def test_versions() -> None:
    check_version(None)
    check_version(b"2023-06-01")
    check_version(b"2026-10-21")
    for other in (b"2023-01-01", b"2030-01-01", b"", b"\xff"):
        with pytest.raises(HttpError, match=r"anthropic-version: .* is not spoken here"):
            check_version(other)
