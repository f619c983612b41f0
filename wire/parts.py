"""Encode and decode messages as ZeroMQ multipart messages.  SPEC 2.1.

    [tag u32] [headers: n x 16 bytes] [payload part]*

Only DECODE_TOKEN may carry n > 1 headers: one message per engine step holds every token of the
step.  Payload parts are passed through untouched, so a KV segment is never copied here.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

import msgspec

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import HEADER_BYTES, MAX_TOKEN_ID, DecodeToken, Frame, Tag, frame_of

TAG: Final = Struct("<I")
# `DecodeToken.layout` with an unsigned token id: a negative one reads as a huge number, so that one
# comparison rejects both kinds of invalid id.
_TOKENS: Final = Struct("<QQ")
# More than the running sequences, and so the tokens per engine step, of any worker.
MAX_HEADERS: Final = 4096

Buffer = bytes | bytearray | memoryview


class Message(msgspec.Struct, frozen=True):
    """One message: its header and payload parts.

    For DECODE_TOKEN, `frame` is the first header and `tokens` has the (request id, token id) of
    every header.  They are plain tuples because a router reads far more tokens than other frames.
    """

    frame: Frame
    payload: tuple[Buffer, ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()

    @property
    def tag(self) -> Tag:
        return self.frame.tag

    def body(self) -> Buffer:
        """Return the payload as one buffer.  Copies only if the payload has several parts."""
        if len(self.payload) == 1:
            return self.payload[0]
        return b"".join(self.payload)


def encode(frames: Frame | Sequence[Frame], *payload: Buffer) -> list[Buffer]:
    """Return the parts of one ZeroMQ message.  Payload buffers are not copied.

    Raises:
        LocalProtocolError: There is no frame, or several frames are not all DECODE_TOKEN.
    """
    if isinstance(frames, Frame):
        return [TAG.pack(frames.tag), frames.header(), *payload]
    if not 0 < len(frames) <= MAX_HEADERS:
        raise LocalProtocolError(f"a message carries 1 to {MAX_HEADERS} headers, not {len(frames)}")
    tag = frames[0].tag
    if len(frames) > 1 and any(frame.tag != Tag.DECODE_TOKEN for frame in frames):
        raise LocalProtocolError("only DECODE_TOKEN may carry several headers")
    return [TAG.pack(tag), b"".join([frame.header() for frame in frames]), *payload]


def decode(parts: Sequence[Buffer]) -> Message:
    """Decode the parts of one ZeroMQ message.  Raises RemoteProtocolError if they are malformed."""
    if len(parts) < 2:
        raise RemoteProtocolError(f"a message has at least 2 parts, this one {len(parts)}")
    if len(parts[0]) != TAG.size:
        raise RemoteProtocolError(f"the tag part has {len(parts[0])} bytes, not {TAG.size}")
    (tag,) = TAG.unpack(parts[0])
    headers = memoryview(parts[1])
    num_headers, rest = divmod(len(headers), HEADER_BYTES)
    if rest or not 0 < num_headers <= MAX_HEADERS:
        raise RemoteProtocolError(f"the header part has {len(headers)} bytes, not n x 16")
    if num_headers > 1 and tag != Tag.DECODE_TOKEN:
        raise RemoteProtocolError(f"tag {tag} carries {num_headers} headers, only DECODE_TOKEN may")
    return message_of(tag, headers, tuple(parts[2:]))


def message_of(tag: int, headers: bytes | memoryview, payload: tuple[Buffer, ...]) -> Message:
    """Decode the headers of a message and attach its payload.  Raises RemoteProtocolError."""
    if tag != Tag.DECODE_TOKEN:
        return Message(frame_of(tag, headers), payload)
    tokens = tuple(_TOKENS.iter_unpack(headers))
    for request_id, token_id in tokens:
        if token_id > MAX_TOKEN_ID or not request_id:
            for start in range(0, len(headers), HEADER_BYTES):
                # Raises for the invalid header, with its error message.
                DecodeToken.from_header(headers[start : start + HEADER_BYTES])
    return Message(DecodeToken(*tokens[0]), payload, tokens)
