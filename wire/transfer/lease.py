"""State common to both ends of a transfer: its phase, its lease, its one end.  SPEC 6.6.

Every frame of the peer renews the lease.  The owner polls `expired` and calls `fail`.
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
# OFFERED may go straight to DONE: the receiver's prefix cache held everything, so no byte travels;
# or all went with the offer.
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
    """One end of a transfer: a state, a lease that any frame of the peer renews, a key, an end."""

    def __init__(self, request_id: int, *, lease_s: float, peer: str, now: float) -> None:
        self.request_id = request_id
        self.peer = peer
        self.state = TransferState.OFFERED
        self.error: WireError | None = None
        self.accepted_at: float | None = None
        self.finished_at: float | None = None
        self.lease_s = lease_s
        self._deadline = now + lease_s
        self._sealing: Sealing | None = None  # what its segments may be sealed with, until the end

    @property
    def is_over(self) -> bool:
        """Whether nothing can change any more."""
        return not TRANSITIONS[self.state]

    def expired(self, now: float) -> bool:
        """Whether the peer has been silent for a lease; then call `fail`.

        Also true of a receiver that is DONE: nobody asked for the KV it holds.
        """
        return now >= self._deadline and self.state not in (_S.FAILED, _S.CANCELLED)

    def cancel(self) -> None:
        """End it because nobody wants the result; no effect after the end."""
        self._move(TransferState.CANCELLED)

    def fail(self, error: WireError) -> None:
        """End it because of `error`: a lost peer, an expired lease, our own engine."""
        if self._move(TransferState.FAILED):
            self.error = error

    def on_error(self, code: int, message: str) -> None:
        """Take the peer's ERROR frame: it wants no more of this transfer."""
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
