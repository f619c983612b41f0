"""The frame headers of the protocol: one frozen struct per tag, each 16 bytes long.  SPEC 3-5.

A `Frame` is only the header.  `wire.payloads` and `wire.options` define the payloads; `wire.parts`
encodes both for ZeroMQ and `wire.stream` for raw TCP.  The headers of tags 30, 31, 34, 35 and 36
are byte for byte those of seed 000 (boostr, wire protocol for disaggregated inference).

Nothing here uses a clock or a socket.  Decoders raise `RemoteProtocolError` and nothing else.
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
# The protocol versions in HELLO: of a worker on ZeroMQ, and of a client on raw TCP.  SPEC 10.
VERSION: Final = 3
CLIENT_VERSION: Final = 1

# PREFILL_REQUEST.decode_rank of a client: the router chooses the decode worker.
ANY_RANK: Final = 0xFFFFFFFF
# PREFILL_REQUEST.decode_rank without a decode worker: the first token is also the last.
NO_RANK: Final = 0xFFFFFFFE
# DECODE_REQUEST.max_new_tokens of a client: generate until the context is full.  Routers replace
# it, so a worker never receives it.
AS_MANY_AS_FIT: Final = 0xFFFFFFFF
# Token ids in prompts are u32, so a generated token id must fit into a u32 too.
MAX_TOKEN_ID: Final = 2**32 - 1
# DECODE_DONE.token_id, reserved by seed 000 as the end-of-generation marker.
END_OF_GENERATION: Final = -1


class Tag(IntEnum):
    """Frame types: 30-36 are the data plane (from the seeds), 40-46 the control plane (new)."""

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
    """The role of a peer: `DisaggRole` of seed 000, the raw TCP client, and a worker for both."""

    PREFILL = 0
    DECODE = 1
    ROUTER = 2
    CLIENT = 3
    ANY = 4


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A 16-byte header.  `layout` packs the struct's fields in the order of their definition."""

    tag: ClassVar[Tag]
    layout: ClassVar[Struct]

    def header(self) -> bytes:
        """Encode this header in 16 bytes.  Raises LocalProtocolError if a field is out of range."""
        try:
            return self.layout.pack(*astuple(self))
        except struct.error as error:
            raise LocalProtocolError(f"{self.tag.name} does not fit its header: {error}") from error

    @classmethod
    def from_header(cls, header: bytes | memoryview) -> Self:
        """Decode a header of exactly 16 bytes.  Raises RemoteProtocolError if it is invalid."""
        if len(header) != HEADER_BYTES:
            raise RemoteProtocolError(f"{cls.tag.name} header has {len(header)} bytes, not 16")
        frame = cls(*cls.layout.unpack(header))
        frame.check()
        return frame

    def check(self) -> None:
        """Raise RemoteProtocolError if a reserved field is not 0, or the request id is 0.

        Frames with further constraints extend this method.
        """
        if reserved := getattr(self, "zero", 0):
            raise RemoteProtocolError(f"{self.tag.name}: the reserved field is {reserved}, not 0")
        # In ERROR, request id 0 stands for the connection.
        if getattr(self, "request_id", 1) == 0 and self.tag is not Tag.ERROR:
            raise RemoteProtocolError(f"{self.tag.name}: request_id is 0, not 1 to 2^64 - 1")


class PrefillRequest(Frame, frozen=True):
    """Router to worker: prefill this prompt, send its KV to `decode_rank`.  SPEC 4.1."""

    tag = Tag.PREFILL_REQUEST
    layout = Struct("<QII")

    request_id: int
    seq_len: int
    decode_rank: int


class PrefillDone(Frame, frozen=True):
    """Worker to router: prefill is complete; carries the first token.  SPEC 4.2."""

    tag = Tag.PREFILL_DONE
    layout = Struct("<QQ")

    request_id: int
    kv_bytes: int


class KvCache(Frame, frozen=True):
    """Prefill worker to decode worker: a KV offer (segment 0) or one KV segment.  SPEC 4.3, 6."""

    tag = Tag.KV_CACHE
    layout = Struct("<QII")

    request_id: int
    segment: int
    num_segments: int


class KvCacheAck(Frame, frozen=True):
    """Decode worker to prefill worker: ACK of `kv_bytes` in total, with credit.  SPEC 4.4, 6."""

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
    """Decode worker to router: generation is finished; the last frame of a request.  SPEC 4.7."""

    tag = Tag.DECODE_DONE
    layout = Struct("<Qq")

    request_id: int
    token_id: int = END_OF_GENERATION

    def check(self) -> None:
        Frame.check(self)
        if self.token_id != END_OF_GENERATION:
            raise RemoteProtocolError(f"DECODE_DONE: token_id is {self.token_id}, not -1")


class Hello(Frame, frozen=True):
    """First frame of a peer: its epoch, rank and role, as in its ZeroMQ identity.  SPEC 5.1."""

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
            raise RemoteProtocolError(f"HELLO: role {self.role} is not one of 0 to 4")

    @classmethod
    def of_client(cls) -> Self:
        """Return the HELLO of a raw TCP client, which is the same for all clients."""
        return cls(0, 0, Role.CLIENT, CLIENT_VERSION)


class Welcome(Frame, frozen=True):
    """Router to worker: registered; send a heartbeat every `heartbeat_ms`.  SPEC 5.2."""

    tag = Tag.WELCOME
    layout = Struct("<QII")

    epoch: int
    heartbeat_ms: int
    lease_ms: int


class Heartbeat(Frame, frozen=True):
    """Worker to router or back: the sender is alive; `step` counts engine steps.  SPEC 5.3."""

    tag = Tag.HEARTBEAT
    layout = Struct("<QII")

    step: int
    running: int
    waiting: int


class Peers(Frame, frozen=True):
    """Router to worker: the decode and any workers it may send KV to.  SPEC 5.4."""

    tag = Tag.PEERS
    layout = Struct("<QII")

    epoch: int
    num_peers: int
    zero: int = 0


class Cancel(Frame, frozen=True):
    """From any peer: abort this request, free its resources, send no response.  SPEC 5.5."""

    tag = Tag.CANCEL
    layout = Struct("<QII")

    request_id: int
    code: int
    zero: int = 0


class Error(Frame, frozen=True):
    """From any peer: this request (or, with request_id 0, this connection) failed.  SPEC 5.6."""

    tag = Tag.ERROR
    layout = Struct("<QII")

    request_id: int
    code: int
    zero: int = 0


class DrainAsk(IntEnum):
    """The `ask` of DRAIN: a router asks nothing of a worker, or to drain and then to end.

    With RESTART it ends with an exit status on which its supervisor starts it again.
    """

    NOTHING = 0
    LEAVE = 1
    RESTART = 2


class Drain(Frame, frozen=True):
    """The process that `epoch` identifies leaves.  From a worker: place nothing more on me.  From a
    router: nothing is left on you, `ask`, or, with its own epoch, I leave.  SPEC 5.7.
    """

    tag = Tag.DRAIN
    layout = Struct("<QII")

    epoch: int
    deadline_ms: int
    ask: int = DrainAsk.NOTHING

    def check(self) -> None:
        Frame.check(self)
        if self.ask > max(DrainAsk):
            raise RemoteProtocolError(f"DRAIN: ask {self.ask} is not one of 0 to 2")


FRAMES: Final[dict[int, type[Frame]]] = {kind.tag: kind for kind in Frame.__subclasses__()}


def frame_of(tag: int, header: bytes | memoryview) -> Frame:
    """Decode the 16-byte header of a frame with this tag.  Raises RemoteProtocolError."""
    kind = FRAMES.get(tag)
    if kind is None:
        raise RemoteProtocolError(f"unknown tag {tag}")
    return kind.from_header(header)
