"""The payloads that follow the headers, besides options and KV bytes.  SPEC 4, 5.

Token ids and KV descriptors are fixed little-endian layouts, so that a client in C needs no
library; everything else is one msgpack map, typed, bounded, with unknown keys refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, error, unpack_from
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

from wire.errors import MAX_SHOWN, LocalProtocolError, RemoteProtocolError
from wire.frames import MAX_TOKEN_ID
from wire.layout import KVLayout
from wire.logprobs import Logprobs as Logprobs
from wire.logprobs import PackedLogprobs, check_prompt_logprobs
from wire.maps import Map, check_keys
from wire.options import Options, TokenId, decode_options, encode_options
from wire.parts import Buffer

Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
# A float holds these exactly too, so that sums, JSON and metrics of them are right everywhere.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no larger integers
# \Z: `$` would also match before a line break at the end.
FinishReason = Annotated[str, msgspec.Meta(pattern=r"^(stop|length)\Z")]
# Numbers and runs of them, as Linux lists cores: "0-3,8".
_RUN: Final = "[0-9]{1,5}(-[0-9]{1,5})?"
MAX_CORES_LENGTH = 4096
Cores = Annotated[
    str, msgspec.Meta(max_length=MAX_CORES_LENGTH, pattern=rf"^({_RUN}(,{_RUN})*)?\Z")
]
Processes = Annotated[int, msgspec.Meta(ge=1, le=4096)]
# The longest deadline there is, in seconds.
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=2**31 / 1000)]
# The most prefix hashes that one heartbeat reports as stored, and as evicted: reading them takes
# half a millisecond of the router's loop.
MAX_HASHES: Final = 1024
Hashes = Annotated[tuple[U64, ...], msgspec.Meta(max_length=MAX_HASHES)]
# A host's name or address with a port, or the path of a socket file.  Characters with a meaning of
# their own to libzmq or a shell (`;`, `*`, spaces) are refused.
_PORT: Final = (
    "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
)
_ENDPOINT: Final = (
    r"(tcp://([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\])"
    rf":{_PORT}|ipc://[A-Za-z0-9_./@+-]+)"
)
Endpoint = Annotated[str, msgspec.Meta(max_length=256, pattern=rf"^{_ENDPOINT}\Z")]
EndpointOrNone = Annotated[str, msgspec.Meta(max_length=256, pattern=rf"^{_ENDPOINT}?\Z")]
# Where a request failed.
Stage = Annotated[str, msgspec.Meta(pattern=r"^(router|prefill|transfer|decode)\Z")]

# PREFILL_DONE: the request ended on a stop token before any text.
NO_TOKEN: Final = -1
# The finish_reason of a request that ended on an EOS or stop token.
STOP: Final = "stop"

_COUNT: Final = Struct("<I")
_TOKEN: Final = Struct("<q")


class HelloDetail(Map, frozen=True, kw_only=True):
    """HELLO of a worker: what the router checks and places by.  SPEC 5.1."""

    model: Name
    fingerprint: Name
    layout: KVLayout
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    num_blocks: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    max_model_len: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    max_kv_transfer_bytes: Size
    arithmetic: Name
    threads: Annotated[int, msgspec.Meta(ge=1, le=2**16 - 1)]
    kv_endpoint: EndpointOrNone = ""
    cores: Cores = ""
    kv_unasked_bytes: Size = 0
    shards: Processes = 1
    stages: Processes = 1


class WelcomeDetail(Map, frozen=True, kw_only=True):
    """WELCOME: the router's own settings that bind a worker.  SPEC 5.2."""

    max_kv_transfer_bytes: Size


class Load(Map, frozen=True, kw_only=True):
    """HEARTBEAT of a worker: its blocks, its progress, what its prefix cache gained and lost.

    `step_ms`: age of the step under way.  Prefix hashes are `wire.prefix`'s (u64).  SPEC 5.3.
    """

    total: Count
    used: Count
    cached: Count
    free: Count
    kv_inflight_bytes: Count = 0
    preemptions: Count = 0
    step_ms: Count = 0
    stored: Hashes = ()
    evicted: Hashes = ()


class PeerDetail(Map, frozen=True, kw_only=True):
    """One decode worker in PEERS; it takes `kv_unasked_bytes` with an offer.  SPEC 5.4."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    epoch: U64
    kv_endpoint: Endpoint
    block_size: Count = 0
    kv_unasked_bytes: Size = 0


class PrefillRest(Map, frozen=True, kw_only=True):
    """The map behind the first token in PREFILL_DONE; `wire.logprobs` unpacks `prompt_logprobs`.

    `stop_token_id` is the EOS or stop token that came instead of a first one.  SPEC 4.2.
    """

    cached_tokens: Count = 0
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: PackedLogprobs | None = None
    stop_token_id: TokenId | None = None


class PrefillResult(PrefillRest, frozen=True, kw_only=True):
    """PREFILL_DONE: the first token.  `finish_reason` is set when it is also the last.  SPEC 4.2.

    Not a map on the wire: `encode_prefill_result` puts `token_id` first, as an i64, so that a
    client in C can read it.  It is `NO_TOKEN` when the request ended on a stop token.
    """

    token_id: int


class Usage(Map, frozen=True, kw_only=True):
    """DECODE_DONE: the reason of the end, and the cost.  SPEC 4.7.

    `kv_bytes` came from the prefill worker, `kv_skipped_tokens` were cached by the decode worker;
    `kv_seconds` is from the offer's acceptance to the last byte, `kv_transfer_seconds` without the
    sender's idle time.  `stop_token_id` is the EOS or stop token, with its `stop_logprobs`.
    """

    finish_reason: FinishReason
    completion_tokens: Count = 0
    kv_bytes: Count = 0
    kv_skipped_tokens: Count = 0
    kv_seconds: Seconds = 0.0
    kv_transfer_seconds: Seconds = 0.0
    stop_token_id: TokenId | None = None
    stop_logprobs: Logprobs | None = None


class ErrorDetail(Map, frozen=True, kw_only=True):
    """ERROR: a sentence for people, and where it happened.  SPEC 5.6."""

    message: Text
    param: Name | None = None
    stage: Stage | None = None
    worker: Name | None = None
    retry_after_s: Seconds | None = None


_ENCODER = msgspec.msgpack.Encoder()
_M = TypeVar("_M")
_DECODERS: dict[type, msgspec.msgpack.Decoder] = {}  # type: ignore[type-arg]


def encode_map(payload: msgspec.Struct | Sequence[msgspec.Struct | None]) -> bytes:
    """Return the msgpack form of one payload map, or of a list of them."""
    return _ENCODER.encode(payload)


def decode_map(kind: type[_M], buffer: Buffer) -> _M:
    """Read one payload map (or `list[Kind]`).  Raises RemoteProtocolError."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    try:
        decoded = decoder.decode(buffer)
        check_keys(buffer, *NESTED.get(kind, ()))
        return decoded  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        # The field first: the end is cut, for a key that is unknown is quoted at any length.
        what, _, where = str(problem).rpartition(" - at ")
        said = f"{where}: {what}" if what else where
        name = getattr(kind, "__name__", kind)
        raise RemoteProtocolError(f"{name}: {said}"[:MAX_SHOWN]) from problem


def encode_prefill_result(result: PrefillResult) -> bytes:
    """PREFILL_DONE payload: ``i64 token_id`` then the rest as a map, if there is any.  SPEC 4.2.

    Raises:
        LocalProtocolError: `token_id` is no u32, though the request goes on.
    """
    token_id = NO_TOKEN if result.finish_reason == STOP else result.token_id
    if not 0 <= token_id <= MAX_TOKEN_ID and result.finish_reason != STOP:
        raise LocalProtocolError(f"PREFILL_DONE: {token_id} is no token id")
    fields = {name: getattr(result, name) for name in PrefillRest.__struct_fields__}
    rest = _ENCODER.encode(PrefillRest(**fields))
    return _TOKEN.pack(token_id) + (b"" if rest == b"\x80" else rest)


def decode_prefill_result(buffer: Buffer) -> PrefillResult:
    """Read a PREFILL_DONE payload.  Raises RemoteProtocolError."""
    if len(buffer) < _TOKEN.size:
        raise RemoteProtocolError(f"PREFILL_DONE payload has {len(buffer)} bytes, not >= 8")
    (token_id,) = _TOKEN.unpack_from(buffer)
    rest = decode_map(PrefillRest, memoryview(buffer)[_TOKEN.size :] or b"\x80")
    is_none = token_id == NO_TOKEN
    if not NO_TOKEN <= token_id <= MAX_TOKEN_ID or is_none != (rest.finish_reason == STOP):
        raise RemoteProtocolError(
            f"PREFILL_DONE: token_id {token_id} with finish_reason {rest.finish_reason}"
        )
    if rest.prompt_logprobs is not None:
        check_prompt_logprobs(rest.prompt_logprobs)
    return PrefillResult(token_id=token_id, **msgspec.structs.asdict(rest))


def decode_error(buffer: Buffer) -> ErrorDetail:
    """Read an ERROR payload; a peer may send none.  Raises RemoteProtocolError."""
    return decode_map(ErrorDetail, buffer) if len(buffer) else ErrorDetail(message="")


def encode_prompt(token_ids: Sequence[int], options: Options) -> bytes:
    """PREFILL_REQUEST payload: ``u32 x seq_len`` then options.  SPEC 4.1."""
    return Struct(f"<{len(token_ids)}I").pack(*token_ids) + encode_options(options)


def decode_prompt(buffer: Buffer, seq_len: int) -> tuple[tuple[int, ...], Options]:
    """Read a PREFILL_REQUEST payload whose header says `seq_len`.  Raises RemoteProtocolError."""
    return _token_ids(buffer, 0, seq_len), decode_options(memoryview(buffer)[4 * seq_len :])


def encode_continuation(token_ids: Sequence[int], options: Options) -> bytes:
    """DECODE_REQUEST payload: ``u32 count, u32 x count`` then options.  SPEC 4.5."""
    return _COUNT.pack(len(token_ids)) + encode_prompt(token_ids, options)


def decode_continuation(buffer: Buffer) -> tuple[tuple[int, ...], Options]:
    """Read a DECODE_REQUEST payload; an empty one means no ids and default options.

    Raises:
        RemoteProtocolError: Fewer bytes than the count says, or bad options.
    """
    if len(buffer) == 0:
        return (), Options()
    if len(buffer) < _COUNT.size:
        raise RemoteProtocolError(f"DECODE_REQUEST payload has {len(buffer)} bytes, not 0 or >= 4")
    (count,) = _COUNT.unpack_from(buffer)
    token_ids = _token_ids(buffer, _COUNT.size, count)
    return token_ids, decode_options(memoryview(buffer)[_COUNT.size + 4 * count :])


def _token_ids(buffer: Buffer, offset: int, count: int) -> tuple[int, ...]:
    if len(buffer) - offset < 4 * count:
        raise RemoteProtocolError(
            f"the payload has {len(buffer) - offset} bytes, too few for {count} token ids"
        )
    try:
        return unpack_from(f"<{count}I", buffer, offset)
    except error as problem:
        raise RemoteProtocolError("token ids are not u32 little-endian") from problem


# A Unix socket in the abstract namespace.  A peer chooses it: the prefix keeps it off other
# sockets.
SocketName = Annotated[str, msgspec.Meta(pattern=r"^baton-[A-Za-z0-9-]{1,90}\Z")]
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Offer(Map, frozen=True, kw_only=True):
    """Segment 0: the offer, for which the receiver reserves blocks.  SPEC 6.2.

    `memory` is the socket that hands out the memory of the KV (SPEC 6.8); `token` opens a
    connection for segments, and `key` seals them there (SPEC 6.9).
    """

    layout: KVLayout
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    total_bytes: Count
    token_ids: bytes
    digest: Annotated[str, msgspec.Meta(pattern=r"^xxh3_64\Z")] = "xxh3_64"
    memory: SocketName | None = None
    key: Key | None = None
    token: Key | None = None

    def __repr__(self) -> str:
        """Leave out the key and the prompt, which must not get into a log."""
        return f"Offer(num_tokens={self.num_tokens}, total_bytes={self.total_bytes})"


# The keys of each map, at any depth, whose values are maps: their keys must be distinct too.
NESTED: Final[dict[type, tuple[str, ...]]] = {
    KVLayout: ("groups",),
    HelloDetail: ("layout", "groups"),
    PrefillRest: ("logprobs",),
    Offer: ("layout", "groups"),
    Usage: ("stop_logprobs",),
}


class Credit(NamedTuple):
    """KV_CACHE_ACK payload: up to `credit` bytes in all may be sent.  SPEC 4.4.

    `cached_tokens` leading tokens are held and are not to be sent.  `ready` is 1 in the final ACK:
    every byte is in its blocks.  `credit` 0 and `ready` 0: the offer waits for blocks.  `in_memory`
    is 1 if segments may lie in the offered memory; `segment_port` is the port for segments on a
    connection of their own, 0 for none.  Only `credit` and `ready` ever change.
    """

    credit: int
    cached_tokens: int
    ready: int
    in_memory: int = 0
    segment_port: int = 0

    def pack(self) -> bytes:
        return CREDIT.pack(*self)

    @classmethod
    def unpack(cls, buffer: Buffer) -> Credit:
        """Read a credit.  Raises RemoteProtocolError."""
        if len(buffer) != CREDIT.size:
            raise RemoteProtocolError(f"the credit has {len(buffer)} bytes, not {CREDIT.size}")
        credit = cls(*CREDIT.unpack(buffer))
        for name in ("ready", "in_memory"):
            if (flag := getattr(credit, name)) not in (0, 1):
                raise RemoteProtocolError(f"KV_CACHE_ACK: {name} is {flag}, not 0 or 1")
        return credit


CREDIT: Final = Struct("<QIBBH")
