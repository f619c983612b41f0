"""The options of a request: one msgpack map, every field optional.  SPEC 4.8.

Unknown keys and values out of range are rejected with an error that names the field.  A client may
send no options at all, and then gets greedy decoding.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from wire.errors import MAX_SHOWN, ErrorCode, RemoteProtocolError
from wire.maps import Map, check_keys
from wire.parts import Buffer

# Enough for a request with every option at its own limit.
MAX_OPTIONS_BYTES: Final = 256 * 1024
# An agent's tools with their schemas can have tens of thousands of characters.
MAX_STRUCTURE_LENGTH: Final = 64 * 1024
MAX_ALLOWED_TOKEN_IDS: Final = 4096
MAX_BAD_SEQUENCES: Final = 256
MAX_BAD_SEQUENCE_LENGTH: Final = 64
MAX_STOP_TOKEN_IDS: Final = 256
MAX_TOP_LOGPROBS: Final = 20
MAX_LOGIT_BIASES: Final = 1024

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
# The longest has the hexadecimal digits of a digest of 512 bits.
MAX_CACHE_SALT_LENGTH: Final = 128
CacheSalt = Annotated[str, msgspec.Meta(max_length=MAX_CACHE_SALT_LENGTH)]
# Trace Context of W3C: version 0, trace id, parent id and flags; an id of zeros is invalid there.
Traceparent = Annotated[
    str, msgspec.Meta(pattern=r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
]
NumTop = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
# From 1/100 to 100; beyond that, logits could overflow float32.
RepetitionPenalty = Annotated[float, msgspec.Meta(ge=0.01, le=100.0)]
Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]
LogitBias = Annotated[tuple[tuple[TokenId, Bias], ...], msgspec.Meta(max_length=MAX_LOGIT_BIASES)]
BadSequence = Annotated[
    tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_BAD_SEQUENCE_LENGTH)
]


class Structure(Map, frozen=True):
    """Structured output: a constraint on the whole text of a response.

    `text` is a JSON schema, a regular expression, or a grammar in llguidance's Lark dialect.
    `wire.process.structured_output` checks whether a model's output can be constrained to it.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STRUCTURE_LENGTH)]


class Options(Map, frozen=True, kw_only=True):
    """Sampling parameters and limits of one request.

    `temperature` 0 is greedy.  `top_k` 0 and `top_p` 1 disable their filter.  The repetition
    penalty applies to tokens of prompt and response, the other two only to those of the response.
    `logit_bias` has (token id, bias) pairs.  `allowed_token_ids`, if not empty, are the only tokens
    sampled; a token that would complete one of `bad_sequences` is never sampled.  `seed` and
    `choice` are the key of the counter-based random generator, so that each position gets the same
    random number on every worker.  `max_tokens` includes the token from prefill.  `logprobs` and
    `prompt_logprobs` are numbers of top tokens.  `deadline_ms` counts from receipt of the frame.
    Only requests with an equal `cache_salt` share cached prefixes; "" is no salt.
    `traceparent` is that of W3C Trace Context, whose trace id the logs of router and workers name.
    Only routers set `generated_tokens`, how many ids at the end of PREFILL_REQUEST an earlier
    attempt generated, `tenant`, an opaque id of the API key or address, for fair scheduling, and
    `timeline`, which asks for `wire.timeline` in PREFILL_DONE and DECODE_DONE.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = ()
    structure: Structure | None = None
    allowed_token_ids: Annotated[
        tuple[TokenId, ...], msgspec.Meta(max_length=MAX_ALLOWED_TOKEN_IDS)
    ] = ()
    bad_sequences: Annotated[
        tuple[BadSequence, ...], msgspec.Meta(max_length=MAX_BAD_SEQUENCES)
    ] = ()
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    choice: Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)] = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    generated_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: NumTop | None = None
    prompt_logprobs: NumTop | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    tenant: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    cache_salt: CacheSalt = ""
    traceparent: Traceparent | None = None
    timeline: bool = False

    @property
    def trace_id(self) -> str | None:
        """The trace id in `traceparent`: 32 hexadecimal digits."""
        return None if self.traceparent is None else self.traceparent.split("-")[1]

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is set, so that sampling depends on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


# First byte of a msgpack map: followed by a 16-bit count, or with a 4-bit count in its low bits.
_MAP_16: Final = 0xDE
_FIXED_MAP: Final = 0x80
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Options)


def encode_options(options: Options) -> bytes:
    """Encode options as a msgpack map; as no bytes at all if every field has its default."""
    encoded = _ENCODER.encode(options)
    if encoded[0] == _MAP_16 and encoded[1] == 0 and encoded[2] < 16:
        # The encoder chose the map's header for all fields; with few set, use the short one.
        encoded = bytes((_FIXED_MAP | encoded[2],)) + encoded[3:]
    return b"" if encoded[0] == _FIXED_MAP else encoded


def decode_options(buffer: Buffer) -> Options:
    """Decode options; an empty buffer means all defaults.  Raises RemoteProtocolError."""
    if len(buffer) == 0:
        return Options()
    if len(buffer) > MAX_OPTIONS_BYTES:
        raise RemoteProtocolError(
            f"options are {len(buffer)} bytes, over the limit of {MAX_OPTIONS_BYTES}",
            ErrorCode.INVALID_REQUEST,
        )
    try:
        options = _DECODER.decode(buffer)
        check_keys(buffer, "structure")
        return options
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The message quotes an unknown key, whose length the peer chose: truncate it.
        raise RemoteProtocolError(
            f"options: {error}"[:MAX_SHOWN], ErrorCode.INVALID_REQUEST
        ) from error
