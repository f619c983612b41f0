"""The frames of the protocol: a frozen struct per tag, a fixed 16-byte header each.  SPEC 3-5.

A frame here is a header.  Payloads are in `wire.payloads` and `wire.options`; how both are laid
out on ZeroMQ is `wire.parts`, on raw TCP `wire.stream`.  The headers of tags 30, 31, 34, 35 and 36
are byte for byte those of seed 000 (boostr, wire protocol for disaggregated inference).

Nothing here reads a clock or a socket.  Decoders raise `RemoteProtocolError` and nothing else.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from struct import Struct
from typing import ClassVar, Final, Self

import msgspec
from msgspec.structs import astuple

from wire.errors import LocalProtocolError, RemoteProtocolError

HEADER_BYTES: Final = 16
# The version that HELLO names: a worker's on the bus, a client's on raw TCP.  SPEC 10.
VERSION: Final = 2
CLIENT_VERSION: Final = 1

# PREFILL_REQUEST.decode_rank: any decode worker will do (a client leaves the choice to the router).
ANY_RANK: Final = 0xFFFFFFFF
# PREFILL_REQUEST.decode_rank: no decode worker; the first token is also the last.
NO_RANK: Final = 0xFFFFFFFE
# DECODE_REQUEST.max_new_tokens of a client: to the end of the context.  A worker gets a number.
AS_MANY_AS_FIT: Final = 0xFFFFFFFF
# Token ids are u32 wherever a prompt is written, so a generated one must fit there too.
MAX_TOKEN_ID: Final = 2**32 - 1
# DECODE_DONE.token_id, reserved by seed 000 as the end-of-generation marker.
END_OF_GENERATION: Final = -1


class Tag(IntEnum):
    """Frame types.  30-36 are the seeds' data plane, 40-46 our control plane."""

    PREFILL_REQUEST = 30
    PREFILL_DONE = 31
    KV_CACHE = 32
    KV_CACHE_ACK = 33
    DECODE_REQUEST = 34
    DECODE_TOKEN = 35
    DECODE_DONE = 36
    HELLO = 40
    WELCOME = 41
    HEARTBEAT = 42
    PEERS = 43
    CANCEL = 44
    ERROR = 45
    DRAIN = 46


class Role(IntEnum):
    """The role of a peer (seed 000: DisaggRole, and the raw TCP client)."""

    PREFILL = 0
    DECODE = 1
    ROUTER = 2
    CLIENT = 3


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A 16-byte header; `layout` packs the fields in their order."""

    tag: ClassVar[Tag]
    layout: ClassVar[Struct]

    def header(self) -> bytes:
        """Return the 16 bytes of this header.  Raises LocalProtocolError."""
        try:
            return self.layout.pack(*astuple(self))
        except struct.error as error:
            raise LocalProtocolError(f"{self.tag.name} does not fit its header: {error}") from error

    @classmethod
    def from_header(cls, header: bytes | memoryview) -> Self:
        """Read a header of exactly 16 bytes.  Raises RemoteProtocolError."""
        if len(header) != HEADER_BYTES:
            raise RemoteProtocolError(f"{cls.tag.name} header has {len(header)} bytes, not 16")
        frame = cls(*cls.layout.unpack(header))
        frame.check()
        return frame

    def check(self) -> None:
        """Refuse reserved fields that are not zero, and a request_id that names no request.

        Frames with more to refuse override this.  Raises RemoteProtocolError: as above.
        """
        if reserved := getattr(self, "zero", 0):
            raise RemoteProtocolError(f"{self.tag.name}: the reserved field is {reserved}, not 0")
        # In ERROR it names the connection.
        if getattr(self, "request_id", 1) == 0 and self.tag is not Tag.ERROR:
            raise RemoteProtocolError(f"{self.tag.name}: request_id is 0, not 1 to 2^64 - 1")


class PrefillRequest(Frame, frozen=True):
    """Router to prefill worker: read this prompt, hand its KV to `decode_rank`.  SPEC 4.1."""

    tag = Tag.PREFILL_REQUEST
    layout = Struct("<QII")

    request_id: int
    seq_len: int
    decode_rank: int


class PrefillDone(Frame, frozen=True):
    """Prefill worker to router: the prompt is read, here is the first token.  SPEC 4.2."""

    tag = Tag.PREFILL_DONE
    layout = Struct("<QQ")

    request_id: int
    kv_bytes: int


class KvCache(Frame, frozen=True):
    """Prefill worker to decode worker: the offer (segment 0) or one KV segment.  SPEC 4.3, 6."""

    tag = Tag.KV_CACHE
    layout = Struct("<QII")

    request_id: int
    segment: int
    num_segments: int


class KvCacheAck(Frame, frozen=True):
    """Decode worker to prefill worker: `kv_bytes` received so far; carries credit.  SPEC 4.4, 6."""

    tag = Tag.KV_CACHE_ACK
    layout = Struct("<QQ")

    request_id: int
    kv_bytes: int


class DecodeRequest(Frame, frozen=True):
    """Router to decode worker: generate up to `max_new_tokens` more tokens.  SPEC 4.5."""

    tag = Tag.DECODE_REQUEST
    layout = Struct("<QII")

    request_id: int
    max_new_tokens: int
    zero: int = 0


class DecodeToken(Frame, frozen=True):
    """Decode worker to router: one generated token.  SPEC 4.6."""

    tag = Tag.DECODE_TOKEN
    layout = Struct("<Qq")

    request_id: int
    token_id: int

    def check(self) -> None:
        Frame.check(self)
        if not 0 <= self.token_id <= MAX_TOKEN_ID:
            raise RemoteProtocolError(f"DECODE_TOKEN: token_id {self.token_id} is no u32")


class DecodeDone(Frame, frozen=True):
    """Decode worker to router: generation is finished, nothing follows.  SPEC 4.7."""

    tag = Tag.DECODE_DONE
    layout = Struct("<Qq")

    request_id: int
    token_id: int = END_OF_GENERATION

    def check(self) -> None:
        Frame.check(self)
        if self.token_id != END_OF_GENERATION:
            raise RemoteProtocolError(f"DECODE_DONE: token_id is {self.token_id}, not -1")


class Hello(Frame, frozen=True):
    """A peer introduces itself, as its ZeroMQ identity says too.  SPEC 5.1."""

    tag = Tag.HELLO
    layout = Struct("<QIBBH")

    epoch: int
    rank: int
    role: int
    version: int = VERSION
    zero: int = 0

    def check(self) -> None:
        Frame.check(self)
        if self.role > max(Role):
            raise RemoteProtocolError(f"HELLO: role {self.role} is not one of 0 to 3")

    @classmethod
    def of_client(cls) -> Self:
        """Return the only one that a raw TCP client may say."""
        return cls(0, 0, Role.CLIENT, CLIENT_VERSION)


class Welcome(Frame, frozen=True):
    """Router to worker: you are registered; beat every `heartbeat_ms`.  SPEC 5.2."""

    tag = Tag.WELCOME
    layout = Struct("<QII")

    epoch: int
    heartbeat_ms: int
    lease_ms: int


class Heartbeat(Frame, frozen=True):
    """Either way: alive and progressing; `step` counts engine steps.  SPEC 5.3."""

    tag = Tag.HEARTBEAT
    layout = Struct("<QII")

    step: int
    running: int
    waiting: int


class Peers(Frame, frozen=True):
    """Router to worker: the decode workers one may hand KV to.  SPEC 5.4."""

    tag = Tag.PEERS
    layout = Struct("<QII")

    epoch: int
    num_peers: int
    zero: int = 0


class Cancel(Frame, frozen=True):
    """Any peer: drop this request, free what it holds, answer nothing more.  SPEC 5.5."""

    tag = Tag.CANCEL
    layout = Struct("<QII")

    request_id: int
    code: int
    zero: int = 0


class Error(Frame, frozen=True):
    """Any peer: this request (or, with request_id 0, this connection) failed.  SPEC 5.6."""

    tag = Tag.ERROR
    layout = Struct("<QII")

    request_id: int
    code: int
    zero: int = 0


class Drain(Frame, frozen=True):
    """Worker: place nothing more on me.  Router: nothing of mine is left with you.  SPEC 5.7."""

    tag = Tag.DRAIN
    layout = Struct("<QII")

    epoch: int
    deadline_ms: int
    zero: int = 0


FRAMES: Final[dict[int, type[Frame]]] = {kind.tag: kind for kind in Frame.__subclasses__()}


def frame_of(tag: int, header: bytes | memoryview) -> Frame:
    """Read the 16-byte header of a frame with this tag.  Raises RemoteProtocolError."""
    kind = FRAMES.get(tag)
    if kind is None:
        raise RemoteProtocolError(f"unknown tag {tag}")
    return kind.from_header(header)
