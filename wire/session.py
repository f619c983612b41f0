"""The life of one request as a table: which frames are allowed in which state.  SPEC 7.

A raw TCP client asks the router, and the router asks its pair of workers, in the same frames; both
use this table.  `Session` knows our side, and so the side at fault.

Frames cross: a CANCEL or DECODE_REQUEST may be under way when the end comes, and responses to a
cancelled request still arrive.  The table has those too; they change nothing.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Final

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import Tag


class Direction(StrEnum):
    """Which way a frame goes."""

    REQUEST = "request"  # from client to router, from router to workers
    RESPONSE = "response"  # back


class SessionState(Enum):
    """The state of a request."""

    IDLE = "idle"
    PREFILLING = "prefilling"
    PIPELINED = "pipelined"  # prefilling, and DECODE_REQUEST is there already
    PREFILLED = "prefilled"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ASK, _ANSWER, _S = Direction.REQUEST, Direction.RESPONSE, SessionState
_ENDS: Final = {(_ANSWER, Tag.ERROR): _S.FAILED, (_ASK, Tag.CANCEL): _S.CANCELLED}

Table = dict[SessionState, dict[tuple[Direction, Tag], SessionState]]

SESSION: Final[Table] = {
    _S.IDLE: {(_ASK, Tag.PREFILL_REQUEST): _S.PREFILLING},
    _S.PREFILLING: {
        (_ASK, Tag.DECODE_REQUEST): _S.PIPELINED,
        (_ANSWER, Tag.PREFILL_DONE): _S.PREFILLED,
        **_ENDS,
    },
    _S.PIPELINED: {(_ANSWER, Tag.PREFILL_DONE): _S.DECODING, **_ENDS},
    _S.PREFILLED: {
        (_ASK, Tag.DECODE_REQUEST): _S.DECODING,
        # The first token was also the last: PREFILL_DONE carried a finish_reason.
        (_ANSWER, Tag.DECODE_DONE): _S.DONE,
        **_ENDS,
    },
    _S.DECODING: {
        (_ANSWER, Tag.DECODE_TOKEN): _S.DECODING,
        (_ANSWER, Tag.DECODE_DONE): _S.DONE,
        **_ENDS,
    },
    _S.DONE: {(_ASK, Tag.DECODE_REQUEST): _S.DONE, (_ASK, Tag.CANCEL): _S.DONE},
    _S.FAILED: {(_ASK, Tag.DECODE_REQUEST): _S.FAILED, (_ASK, Tag.CANCEL): _S.FAILED},
    _S.CANCELLED: {
        (_ASK, Tag.CANCEL): _S.CANCELLED,
        (_ANSWER, Tag.PREFILL_DONE): _S.CANCELLED,
        (_ANSWER, Tag.DECODE_TOKEN): _S.CANCELLED,
        (_ANSWER, Tag.DECODE_DONE): _S.CANCELLED,
        (_ANSWER, Tag.ERROR): _S.CANCELLED,
    },
}
ENDED: Final = frozenset({_S.DONE, _S.FAILED, _S.CANCELLED})


class Session:
    """One request on one connection; `sends` is the direction of our own frames."""

    def __init__(self, sends: Direction) -> None:
        self.sends = sends
        self.state = SessionState.IDLE

    @property
    def is_over(self) -> bool:
        """Whether the terminal event has been sent or received."""
        return self.state in ENDED

    def on(self, tag: Tag, direction: Direction) -> SessionState:
        """Take one frame, ours or theirs, and return the new state.

        Raises:
            LocalProtocolError: We sent what the table does not allow.
            RemoteProtocolError: The peer did.
        """
        state = SESSION[self.state].get((direction, tag))
        if state is None:
            sentence = f"{tag.name} as a {direction} while {self.state.value}"
            if direction is self.sends:
                raise LocalProtocolError(sentence)
            raise RemoteProtocolError(sentence)
        self.state = state
        return state
