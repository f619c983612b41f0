"""Errors carry a code, their data and their own sentence."""

from __future__ import annotations

import pytest

from wire import errors
from wire.errors import (
    ErrorCode,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    TransferFailed,
    TransferTooLarge,
)


def test_a_protocol_error_names_the_side_at_fault() -> None:
    with pytest.raises(TypeError, match="LocalProtocolError or RemoteProtocolError"):
        ProtocolError("somebody did something")
    assert LocalProtocolError("x").code is ErrorCode.PROTOCOL
    assert RemoteProtocolError("x", ErrorCode.MISMATCH).code is ErrorCode.MISMATCH


def test_transfer_too_large_names_both_sizes_and_the_setting() -> None:
    error = TransferTooLarge(10, 4)
    assert (error.size, error.limit, error.code) == (10, 4, ErrorCode.KV_TRANSFER_TOO_LARGE)
    assert "10 bytes" in str(error) and "max_kv_transfer_bytes = 4" in error.message


def test_transfer_failed_names_the_peer() -> None:
    error = TransferFailed("decode-3", "it left", ErrorCode.WORKER_LOST)
    assert (error.peer, error.reason, error.code) == ("decode-3", "it left", ErrorCode.WORKER_LOST)
    assert str(error) == "KV transfer with decode-3 failed: it left"


def test_a_code_of_a_later_version_is_internal() -> None:
    assert ErrorCode(2**32 - 1) is ErrorCode.INTERNAL
    assert ErrorCode(0) is ErrorCode.INTERNAL
    with pytest.raises(ValueError, match="not a valid"):
        ErrorCode("FENCED")  # type: ignore[arg-type]


def test_errors_quote_the_beginning_of_a_value() -> None:
    assert errors.shown("a\n") == r"'a\n'"
    assert len(errors.shown("a" * 1_000_000)) == errors.MAX_SHOWN + 3
