"""The state machine of one request: which frames are allowed in which state.  SPEC 7.

Requests from a raw TCP client to the router, and from the router to a pair of workers, use the same
frames and this same table.  `Session` stores the direction of this side, to tell which side erred.

Frames can cross: a CANCEL or DECODE_REQUEST may be in flight when the request ends, and responses
to a cancelled request still arrive.  The table allows such frames; they do not change the state.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Final

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import Tag


class Direction(StrEnum):
    """The direction of a frame."""

    REQUEST = "request"  # from client to router, from router to workers
    RESPONSE = "response"  # from router to client, from workers to router


class SessionState(Enum):
    """The state of a request."""

    IDLE = "idle"
    PREFILLING = "prefilling"
    PIPELINED = "pipelined"  # prefilling, and DECODE_REQUEST was sent already
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
    """One request on one connection; `sends` is the direction of this side's frames."""

    def __init__(self, sends: Direction) -> None:
        self.sends = sends
        self.state = SessionState.IDLE

    @property
    def is_over(self) -> bool:
        """Whether the last frame of the request has been sent or received."""
        return self.state in ENDED

    def on(self, tag: Tag, direction: Direction) -> SessionState:
        """Process a frame that was sent or received, and return the new state.

        Raises:
            LocalProtocolError: This side sent a frame that is not allowed in this state.
            RemoteProtocolError: The peer sent a frame that is not allowed in this state.
        """
        state = SESSION[self.state].get((direction, tag))
        if state is None:
            sentence = f"{tag.name} as a {direction} while {self.state.value}"
            if direction is self.sends:
                raise LocalProtocolError(sentence)
            raise RemoteProtocolError(sentence)
        self.state = state
        return state
