"""Errors of the wire protocol, each with a code that crosses the wire.  SPEC 8.

    WireError(code)
      ProtocolError             never raised itself
        LocalProtocolError      we were about to break SPEC: a bug of ours, let it crash the task
        RemoteProtocolError     the peer broke SPEC: drop the peer; the only error decoders raise
      TransferTooLarge          refused before a byte is computed or buffered
      TransferFailed            the KV transfer broke; retryable on another worker
      PeerLost                  the peer's heartbeats stopped or its socket closed
      RequestFailed             the peer ended this one request with an ERROR frame

Each error carries its data and builds its own sentence.  A peer is told the code and a fixed
sentence; details that name paths, payload bytes or other requests stay in the log.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

# Characters that an error repeats of what was sent.
MAX_SHOWN: Final = 200


class ErrorCode(IntEnum):
    """Why a request or a connection ended.  SPEC 8 says who is at fault and what may be retried."""

    INTERNAL = 1
    PROTOCOL = 2
    INVALID_REQUEST = 3
    MODEL_NOT_FOUND = 4
    CONTEXT_LENGTH_EXCEEDED = 5
    KV_TRANSFER_TOO_LARGE = 6
    UNAUTHORIZED = 7
    OVERLOADED = 8
    NO_WORKER = 9
    DRAINING = 10
    DEADLINE_EXCEEDED = 11
    CANCELLED = 12
    WORKER_LOST = 13
    TRANSFER_FAILED = 14
    OUT_OF_BLOCKS = 15
    UNKNOWN_REQUEST = 16
    UNKNOWN_PEER = 17
    MISMATCH = 18
    FENCED = 19
    MODEL_FAILED = 20

    @classmethod
    def _missing_(cls, value: object) -> ErrorCode | None:
        """Read a code of a later version as INTERNAL, so that no peer's number can crash us."""
        return cls.INTERNAL if isinstance(value, int) else None

    @property
    def label(self) -> str:
        """The lower-case name clients see, for example ``kv_transfer_too_large``."""
        return self.name.lower()


class WireError(Exception):
    """An error with an `ErrorCode`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ProtocolError(WireError):
    """A violation of the protocol; raise the subclass that names the side at fault."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.PROTOCOL) -> None:
        if type(self) is ProtocolError:
            raise TypeError("raise LocalProtocolError or RemoteProtocolError")
        super().__init__(code, message)


class LocalProtocolError(ProtocolError):
    """We were about to break SPEC."""


class RemoteProtocolError(ProtocolError):
    """The peer broke SPEC."""


class TransferTooLarge(WireError):
    """A KV cache of `size` bytes is over the `limit` set by max_kv_transfer_bytes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            ErrorCode.KV_TRANSFER_TOO_LARGE,
            f"the KV cache of this prompt is {size} bytes, over max_kv_transfer_bytes = {limit}; "
            "shorten the prompt or raise the limit on the router and the workers",
        )
        self.size = size
        self.limit = limit


class TransferFailed(WireError):
    """The transfer of a KV cache to or from `peer` ended early."""

    def __init__(self, peer: str, reason: str, code: ErrorCode = ErrorCode.TRANSFER_FAILED) -> None:
        super().__init__(code, f"KV transfer with {peer} failed: {reason}")
        self.peer = peer
        self.reason = reason


class PeerLost(WireError):
    """`peer` stopped sending heartbeats or closed its connection."""

    def __init__(self, peer: str) -> None:
        super().__init__(ErrorCode.WORKER_LOST, f"lost {peer}")
        self.peer = peer


class RequestFailed(WireError):
    """A peer ended one request with ERROR."""


def shown(sent: str) -> str:
    """Return what was sent as an error may repeat it: quoted, and the beginning only."""
    return repr(sent if len(sent) <= MAX_SHOWN else sent[:MAX_SHOWN] + "…")
