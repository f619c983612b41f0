"""Errors as clients hear of them: bodies, statuses, headers."""

from __future__ import annotations

import json

import pytest

from router.api.errors import http_error, invalid
from wire.errors import ErrorCode, TransferTooLarge, WireError


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_status_and_a_word(code: ErrorCode) -> None:
    error = http_error(WireError(code, "what happened"))
    body = json.loads(error.body)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == code.label
    assert error.status in (400, 401, 404, 408, 429, 500, 503)
    names = [name for name, _ in error.headers]
    assert (b"retry-after" in names) == (error.status in (429, 503))


def test_the_status_of_each_failure() -> None:
    assert http_error(TransferTooLarge(9, 5)).status == 400
    assert http_error(WireError(ErrorCode.OVERLOADED, "")).status == 429
    assert http_error(WireError(ErrorCode.NO_WORKER, "")).status == 503
    assert http_error(WireError(ErrorCode.DEADLINE_EXCEEDED, "")).headers == (
        (b"x-should-retry", b"false"),
    )


def test_nobody_is_to_ask_again_what_the_model_cannot_answer() -> None:
    error = http_error(WireError(ErrorCode.MODEL_FAILED, "KeyError: '/home/me/secret'"))
    assert (error.status, error.code) == (500, "model_failed")
    assert error.headers == ((b"x-should-retry", b"false"),)
    assert error.message == "the request failed: model_failed"


def test_words_of_our_own_faults_stay_in_the_log() -> None:
    error = http_error(WireError(ErrorCode.PROTOCOL, "decode-3 said /etc/secret"))
    assert error.status == 500
    assert "secret" not in error.body.decode()


def test_the_field_is_in_the_message() -> None:
    assert invalid("n", "is odd").message == "n: is odd"
    assert invalid(None, "is odd").message == "is odd"
