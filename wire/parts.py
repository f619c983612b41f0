"""The envelope on ZeroMQ: a multipart message is headers and payload parts.  SPEC 2.1.

    [tag u32] [headers: n x 16 bytes] [payload part]*

Only DECODE_TOKEN may carry n > 1 headers: one message per engine step holds every token of the
step.  Payload parts are passed through untouched, so a KV segment crosses without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

import msgspec

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import HEADER_BYTES, MAX_TOKEN_ID, DecodeToken, Frame, Tag, frame_of

TAG: Final = Struct("<I")
# `DecodeToken.layout`, but a token id below 0 reads as a huge one: one comparison finds both.
_TOKENS: Final = Struct("<QQ")
# One engine step's tokens: more running sequences than any worker has, 1 MiB of headers.
MAX_HEADERS: Final = 4096

Buffer = bytes | bytearray | memoryview


class Message(msgspec.Struct, frozen=True):
    """One message: its header or, of DECODE_TOKEN, the first, and the payload parts that follow.

    `tokens` has the request id and the token id of every header of a DECODE_TOKEN: as plain pairs,
    for a router reads a thousand of them while it reads one of anything else.
    """

    frame: Frame
    payload: tuple[Buffer, ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()

    @property
    def tag(self) -> Tag:
        return self.frame.tag

    def body(self) -> Buffer:
        """Return the payload as one buffer; a copy only when it came in several parts."""
        if len(self.payload) == 1:
            return self.payload[0]
        return b"".join(self.payload)


def encode(frames: Frame | Sequence[Frame], *payload: Buffer) -> list[Buffer]:
    """Return the parts of one ZeroMQ message; payload buffers are the very objects passed in.

    Raises:
        LocalProtocolError: No frame, or several that are not all DECODE_TOKEN.
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
    """Read one ZeroMQ message.  Raises RemoteProtocolError: anything that is not such a message."""
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
    """Read the headers of a message.  Raises RemoteProtocolError."""
    if tag != Tag.DECODE_TOKEN:
        return Message(frame_of(tag, headers), payload)
    tokens = tuple(_TOKENS.iter_unpack(headers))
    for request_id, token_id in tokens:
        if token_id > MAX_TOKEN_ID or not request_id:
            for start in range(0, len(headers), HEADER_BYTES):
                DecodeToken.from_header(headers[start : start + HEADER_BYTES])  # one of them raises
    return Message(DecodeToken(*tokens[0]), payload, tokens)
