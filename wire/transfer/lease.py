"""The base class of both ends of a transfer: its state and its lease.  SPEC 6.6.

The lease is the time within which the peer must send a frame.  Every frame renews it.  The owner
polls `expired` and then calls `fail`.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from wire.errors import (
    ErrorCode,
    LocalProtocolError,
    RemoteProtocolError,
    TransferFailed,
    WireError,
)
from wire.transfer.sealing import Sealing


class TransferState(Enum):
    """The state of one end of a transfer."""

    OFFERED = "offered"
    SENDING = "sending"
    SENT = "sent"
    RECEIVING = "receiving"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = TransferState
# OFFERED may change to DONE directly: either the receiver had all the KV in its prefix cache, or
# all the KV was sent together with the offer.
TRANSITIONS: Final[dict[TransferState, frozenset[TransferState]]] = {
    _S.OFFERED: frozenset({_S.SENDING, _S.RECEIVING, _S.DONE, _S.FAILED, _S.CANCELLED}),
    _S.SENDING: frozenset({_S.SENT, _S.FAILED, _S.CANCELLED}),
    _S.SENT: frozenset({_S.DONE, _S.FAILED, _S.CANCELLED}),
    _S.RECEIVING: frozenset({_S.DONE, _S.FAILED, _S.CANCELLED}),
    _S.DONE: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


class Transfer:
    """One end of a transfer: its state, lease and sealing key.  Base of sender and receiver."""

    def __init__(self, request_id: int, *, lease_s: float, peer: str, now: float) -> None:
        self.request_id = request_id
        self.peer = peer
        self.state = TransferState.OFFERED
        self.error: WireError | None = None
        self.accepted_at: float | None = None
        self.finished_at: float | None = None
        self.lease_s = lease_s
        self._deadline = now + lease_s
        self._sealing: Sealing | None = None  # encrypts segments, if keys are in use, until the end

    @property
    def is_over(self) -> bool:
        """Whether the transfer has ended."""
        return not TRANSITIONS[self.state]

    def expired(self, now: float) -> bool:
        """Whether the lease has expired without a frame from the peer; then call `fail`.

        A receiver that is DONE expires too, if no router claims its KV.
        """
        return now >= self._deadline and self.state not in (_S.FAILED, _S.CANCELLED)

    def cancel(self) -> None:
        """End the transfer because the request was cancelled.  No effect after the end."""
        self._move(TransferState.CANCELLED)

    def fail(self, error: WireError) -> None:
        """End the transfer with an error, such as a lost peer, expired lease or engine failure."""
        if self._move(TransferState.FAILED):
            self.error = error

    def on_error(self, code: int, message: str) -> None:
        """Handle the peer's ERROR frame: the peer has aborted this transfer."""
        self.fail(TransferFailed(self.peer, message, ErrorCode(code)))

    def _move(self, state: TransferState) -> bool:
        if state not in TRANSITIONS[self.state]:
            return False
        self.state = state
        if self.is_over:
            self._sealing = None
        return True

    def _violated(self, sentence: str) -> RemoteProtocolError:
        error = RemoteProtocolError(sentence)
        self.fail(error)
        return error

    def _check_id(self, request_id: int) -> None:
        if request_id != self.request_id:
            raise LocalProtocolError(f"frame of {request_id} given to transfer {self.request_id}")
