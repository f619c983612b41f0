"""Encode and decode the payloads that follow the headers, except options and KV.  SPEC 4, 5.

Token ids and KV descriptors have fixed little-endian layouts, so that a client in C needs no
library.  Every other payload is one msgpack map; types, ranges and unknown keys are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, error, unpack_from
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec

from wire.errors import MAX_SHOWN, LocalProtocolError, RemoteProtocolError
from wire.frames import MAX_TOKEN_ID, NO_RANK
from wire.layout import KVLayout
from wire.logprobs import Logprobs as Logprobs
from wire.logprobs import PackedLogprobs, check_prompt_logprobs
from wire.maps import Map, check_keys
from wire.options import CacheSalt, Options, TokenId, decode_options, encode_options
from wire.parts import Buffer
from wire.timeline import PackedTimeline, check_timeline

Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
# A float represents these integers exactly, so that sums, JSON and metrics of them are exact.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no integers above 64 bits
# \Z because `$` would also match before a line break at the end.
FinishReason = Annotated[str, msgspec.Meta(pattern=r"^(stop|length)\Z")]
# A list of CPU cores in the format of Linux, such as "0-3,8".
_RUN: Final = "[0-9]{1,5}(-[0-9]{1,5})?"
MAX_CORES_LENGTH = 4096
Cores = Annotated[
    str, msgspec.Meta(max_length=MAX_CORES_LENGTH, pattern=rf"^({_RUN}(,{_RUN})*)?\Z")
]
Processes = Annotated[int, msgspec.Meta(ge=1, le=4096)]
# A duration, at most as long as the longest deadline.
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=2**31 / 1000)]
# The most prefix hashes that one heartbeat may report as stored, and as evicted from each tier.
# Processing 1024 stored and 1024 evicted ones takes half a millisecond of the router's event loop.
MAX_HASHES: Final = 1024
Hashes = Annotated[tuple[U64, ...], msgspec.Meta(max_length=MAX_HASHES)]
# A host name or address with a port, or the path of a socket file.  Characters that libzmq or a
# shell would interpret (`;`, `*`, spaces) are rejected.
_PORT: Final = (
    "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
)
_ENDPOINT: Final = (
    r"(tcp://([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\])"
    rf":{_PORT}|ipc://[A-Za-z0-9_./@+-]+)"
)
Endpoint = Annotated[str, msgspec.Meta(max_length=256, pattern=rf"^{_ENDPOINT}\Z")]
EndpointOrNone = Annotated[str, msgspec.Meta(max_length=256, pattern=rf"^{_ENDPOINT}?\Z")]
# The stage at which a request failed.
Stage = Annotated[str, msgspec.Meta(pattern=r"^(router|prefill|transfer|decode)\Z")]
# The roles of workers that receive KV.
ReceiverRole = Annotated[str, msgspec.Meta(pattern=r"^(decode|any)\Z")]

# The token_id in PREFILL_DONE if the first token was a stop token: no text was generated.
NO_TOKEN: Final = -1
# The finish_reason of a request that ended on an EOS or stop token.
STOP: Final = "stop"

_COUNT: Final = Struct("<I")
_TOKEN: Final = Struct("<q")


class HelloDetail(Map, frozen=True, kw_only=True):
    """HELLO of a worker: its model and capacity, which the router checks.  SPEC 5.1."""

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
    num_tier_blocks: Count = 0
    shards: Processes = 1
    stages: Processes = 1


class WelcomeDetail(Map, frozen=True, kw_only=True):
    """WELCOME: the router's settings that a worker must use.  SPEC 5.2."""

    max_kv_transfer_bytes: Size


# Where a worker has KV blocks.
Tier = Literal["kv_cache", "host", "disk"]


class TierLoad(Map, frozen=True, kw_only=True):
    """A tier below the KV cache: its room and its content in blocks, and tokens loaded from it.

    `evicted` are like those of `Load`, of blocks that this tier had last.
    """

    max_blocks: Count = 0
    blocks: Count = 0
    bytes: Count = 0
    loaded_tokens: Count = 0
    evicted: Hashes = ()


class Load(Map, frozen=True, kw_only=True):
    """HEARTBEAT of a worker: KV block usage, progress and prefix-cache changes.  SPEC 5.3.

    `step_ms` is how long the current step has been running.  A step takes about `step_s` seconds,
    plus `token_s` for each prompt token and `sequence_s` for each generating sequence in it; None
    means not measured yet.  `stored` are prefix hashes (`wire.prefix`) of blocks added to the
    prefix cache, `evicted` of those that left it and are in no tier.  `host` and `disk` are tiers
    that the worker has.
    """

    total: Count
    used: Count
    cached: Count
    free: Count
    kv_inflight_bytes: Count = 0
    preemptions: Count = 0
    step_ms: Count = 0
    step_s: Seconds | None = None
    token_s: Seconds | None = None
    sequence_s: Seconds | None = None
    stored: Hashes = ()
    evicted: Hashes = ()
    host: TierLoad | None = None
    disk: TierLoad | None = None

    @property
    def losses(self) -> list[tuple[Tier, tuple[int, ...]]]:
        """The hashes of blocks that the worker no longer has, by where it had them last."""
        tiers: list[tuple[Tier, TierLoad | None]] = [("host", self.host), ("disk", self.disk)]
        of_tiers = [(name, tier.evicted) for name, tier in tiers if tier is not None]
        return [it for it in (("kv_cache", self.evicted), *of_tiers) if it[1]]


class PeerDetail(Map, frozen=True, kw_only=True):
    """A decode or any worker in PEERS: `kv_unasked_bytes` of KV may come with an offer.  SPEC 5.4.

    Its key is that of `<role>-<rank>`.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, lt=NO_RANK)]
    epoch: U64
    kv_endpoint: Endpoint
    block_size: Count = 0
    kv_unasked_bytes: Size = 0
    role: ReceiverRole = "decode"


class PrefillRest(Map, frozen=True, kw_only=True):
    """The map that follows the first token in PREFILL_DONE.  SPEC 4.2.

    `wire.logprobs` unpacks `prompt_logprobs`, `wire.timeline` unpacks `timeline`.  `stop_token_id`
    is the EOS or stop token, if the first sampled token was one.
    """

    cached_tokens: Count = 0
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: PackedLogprobs | None = None
    stop_token_id: TokenId | None = None
    timeline: PackedTimeline | None = None


class PrefillResult(PrefillRest, frozen=True, kw_only=True):
    """PREFILL_DONE: the first token.  `finish_reason` is set if it is also the last.  SPEC 4.2.

    Its wire format is not one map: `encode_prefill_result` writes `token_id` first, as an i64, so
    that a client in C can read it.  It is `NO_TOKEN` if the first token was a stop token.
    """

    token_id: int


class Usage(Map, frozen=True, kw_only=True):
    """DECODE_DONE: the finish reason and usage figures.  SPEC 4.7.

    `kv_bytes` were received from the prefill worker; `kv_skipped_tokens` were already cached by the
    decode worker.  `kv_seconds` is the time from accepting the offer to the last byte,
    `kv_transfer_seconds` the same without the sender's idle time.  `stop_token_id` is the EOS or
    stop token that ended the generation, with its `stop_logprobs`.  `wire.timeline` unpacks
    `timeline`.
    """

    finish_reason: FinishReason
    completion_tokens: Count = 0
    kv_bytes: Count = 0
    kv_skipped_tokens: Count = 0
    kv_seconds: Seconds = 0.0
    kv_transfer_seconds: Seconds = 0.0
    stop_token_id: TokenId | None = None
    stop_logprobs: Logprobs | None = None
    timeline: PackedTimeline | None = None


class ErrorDetail(Map, frozen=True, kw_only=True):
    """ERROR: a human-readable message, and the stage and worker that failed.  SPEC 5.6."""

    message: Text
    param: Name | None = None
    stage: Stage | None = None
    worker: Name | None = None
    retry_after_s: Seconds | None = None


_ENCODER = msgspec.msgpack.Encoder()
_M = TypeVar("_M")
_DECODERS: dict[type, msgspec.msgpack.Decoder] = {}  # type: ignore[type-arg]


def encode_map(payload: msgspec.Struct | Sequence[msgspec.Struct | None]) -> bytes:
    """Encode one payload map, or a list of maps, as msgpack."""
    return _ENCODER.encode(payload)


def decode_map(kind: type[_M], buffer: Buffer) -> _M:
    """Decode a payload map of type `kind`, or a `list` of maps.  Raises RemoteProtocolError."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    try:
        decoded = decoder.decode(buffer)
        check_keys(buffer, *NESTED.get(kind, ()))
        return decoded  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        # The field comes first: truncation may cut the end, as unknown keys are quoted in full.
        reason, _, field = str(problem).rpartition(" - at ")
        message = f"{field}: {reason}" if reason else field
        name = getattr(kind, "__name__", kind)
        raise RemoteProtocolError(f"{name}: {message}"[:MAX_SHOWN]) from problem


def encode_prefill_result(result: PrefillResult) -> bytes:
    """Encode a PREFILL_DONE payload: ``i64 token_id``, then a map unless it is empty.  SPEC 4.2.

    Raises:
        LocalProtocolError: `token_id` is not a u32, and the request did not end on a stop token.
    """
    token_id = NO_TOKEN if result.finish_reason == STOP else result.token_id
    if not 0 <= token_id <= MAX_TOKEN_ID and result.finish_reason != STOP:
        raise LocalProtocolError(f"PREFILL_DONE: {token_id} is no token id")
    fields = {name: getattr(result, name) for name in PrefillRest.__struct_fields__}
    rest = _ENCODER.encode(PrefillRest(**fields))
    return _TOKEN.pack(token_id) + (b"" if rest == b"\x80" else rest)


def decode_prefill_result(buffer: Buffer) -> PrefillResult:
    """Decode a PREFILL_DONE payload.  Raises RemoteProtocolError."""
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
    check_timeline(rest.timeline)
    return PrefillResult(token_id=token_id, **msgspec.structs.asdict(rest))


def decode_usage(buffer: Buffer) -> Usage:
    """Decode a DECODE_DONE payload.  Raises RemoteProtocolError."""
    usage = decode_map(Usage, buffer)
    check_timeline(usage.timeline)
    return usage


def decode_error(buffer: Buffer) -> ErrorDetail:
    """Decode an ERROR payload, which may be empty.  Raises RemoteProtocolError."""
    return decode_map(ErrorDetail, buffer) if len(buffer) else ErrorDetail(message="")


def encode_prompt(token_ids: Sequence[int], options: Options) -> bytes:
    """Encode a PREFILL_REQUEST payload: ``u32 x seq_len``, then options.  SPEC 4.1."""
    return Struct(f"<{len(token_ids)}I").pack(*token_ids) + encode_options(options)


def decode_prompt(buffer: Buffer, seq_len: int) -> tuple[tuple[int, ...], Options]:
    """Decode a PREFILL_REQUEST payload; the header has `seq_len`.  Raises RemoteProtocolError."""
    return _token_ids(buffer, 0, seq_len), decode_options(memoryview(buffer)[4 * seq_len :])


def encode_continuation(token_ids: Sequence[int], options: Options) -> bytes:
    """Encode a DECODE_REQUEST payload: ``u32 count, u32 x count``, then options.  SPEC 4.5."""
    return _COUNT.pack(len(token_ids)) + encode_prompt(token_ids, options)


def decode_continuation(buffer: Buffer) -> tuple[tuple[int, ...], Options]:
    """Decode a DECODE_REQUEST payload; an empty one means no ids and default options.

    Raises:
        RemoteProtocolError: The payload is too short for its token ids, or has invalid options.
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


# A Unix socket in the abstract namespace.  A peer chooses the name: the prefix prevents that it
# names a socket of another program.
SocketName = Annotated[str, msgspec.Meta(pattern=r"^baton-[A-Za-z0-9-]{1,90}\Z")]
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Offer(Map, frozen=True, kw_only=True):
    """Payload of segment 0: a KV transfer offer, for which the receiver reserves blocks.  SPEC 6.2.

    `memory` is the socket that passes the descriptor of the shared memory with the KV (SPEC 6.8).
    `token` authorizes a separate TCP connection for segments; `key` encrypts them there (SPEC 6.9).
    `cache_salt` is that of the request's options.
    """

    layout: KVLayout
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    total_bytes: Count
    token_ids: bytes
    digest: Annotated[str, msgspec.Meta(pattern=r"^xxh3_64\Z")] = "xxh3_64"
    memory: SocketName | None = None
    key: Key | None = None
    token: Key | None = None
    cache_salt: CacheSalt = ""

    def __repr__(self) -> str:
        """Omit the key, the salt and the prompt, which must not be logged."""
        return f"Offer(num_tokens={self.num_tokens}, total_bytes={self.total_bytes})"


# For each map, the keys (at any depth) of nested maps, which `check_keys` has to check too.
NESTED: Final[dict[type, tuple[str, ...]]] = {
    KVLayout: ("groups",),
    HelloDetail: ("layout", "groups"),
    Load: ("host", "disk"),
    PrefillRest: ("logprobs",),
    Offer: ("layout", "groups"),
    Usage: ("stop_logprobs",),
}


class Credit(NamedTuple):
    """KV_CACHE_ACK payload: the sender may send up to `credit` bytes in total.  SPEC 4.4.

    The receiver has the first `cached_tokens` tokens already; they must not be sent.  `ready` is 1
    in the final ACK, when all KV is stored in blocks.  `credit` 0 with `ready` 0 means that the
    offer waits for free blocks.  `in_memory` is 1 if segments may refer to the offered shared
    memory.  `segment_port` is the port of a separate TCP connection for segments, 0 for none.  Only
    `credit` and `ready` may change during a transfer.
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
        """Decode a credit.  Raises RemoteProtocolError."""
        if len(buffer) != CREDIT.size:
            raise RemoteProtocolError(f"the credit has {len(buffer)} bytes, not {CREDIT.size}")
        credit = cls(*CREDIT.unpack(buffer))
        for name in ("ready", "in_memory"):
            if (flag := getattr(credit, name)) not in (0, 1):
                raise RemoteProtocolError(f"KV_CACHE_ACK: {name} is {flag}, not 0 or 1")
        return credit


CREDIT: Final = Struct("<QIBBH")
