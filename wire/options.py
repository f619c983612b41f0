"""The options of a request: one msgpack map, every field optional.  SPEC 4.8.

Unknown keys are refused, values out of range are refused, and the error names the field.  A client
that sends no options at all is a valid client: it gets greedy decoding.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from wire.errors import MAX_SHOWN, ErrorCode, RemoteProtocolError
from wire.maps import Map, check_keys
from wire.parts import Buffer

# Every option at its own limit, all in one request, and some room.
MAX_OPTIONS_BYTES: Final = 256 * 1024
# The tools of an agent, each with its schema, are tens of thousands of characters.
MAX_STRUCTURE_LENGTH: Final = 64 * 1024
MAX_ALLOWED_TOKEN_IDS: Final = 4096
MAX_BAD_SEQUENCES: Final = 256
MAX_BAD_SEQUENCE_LENGTH: Final = 64
MAX_STOP_TOKEN_IDS: Final = 256
MAX_TOP_LOGPROBS: Final = 20
MAX_LOGIT_BIASES: Final = 1024

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
NumTop = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
# From 1/100 to 100; beyond that, logits would leave the range of float32.
RepetitionPenalty = Annotated[float, msgspec.Meta(ge=0.01, le=100.0)]
Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]
LogitBias = Annotated[tuple[tuple[TokenId, Bias], ...], msgspec.Meta(max_length=MAX_LOGIT_BIASES)]
BadSequence = Annotated[
    tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_BAD_SEQUENCE_LENGTH)
]


class Structure(Map, frozen=True):
    """A constraint on the whole text of an answer.

    A JSON schema as JSON text, a regular expression, or a grammar in llguidance's Lark dialect.
    Whether a model can be held to it is not asked here (`wire.process.structured_output`).
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STRUCTURE_LENGTH)]


class Options(Map, frozen=True, kw_only=True):
    """Sampling and limits of one request.

    `temperature` 0 is greedy.  `top_k` 0 and `top_p` 1 switch their filter off.  The repetition
    penalty counts tokens of prompt and response, the other two only the response's.  `logit_bias`
    has pairs of token id and bias.  `allowed_token_ids` are the only ones drawn, if there are any;
    a token that would complete one of `bad_sequences` never is.  `seed` and `choice` key the
    counter-based generator: with the position, they give the same number on every worker.
    `max_tokens` includes prefill's first token.  `logprobs` and `prompt_logprobs` are the numbers
    of top tokens.  `deadline_ms` counts from when the frame is read.  Only routers set
    `generated_tokens`, the number of ids at the end of PREFILL_REQUEST that an earlier attempt
    generated, and `tenant`, an opaque name of the API key or address, among which steps are shared.
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

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens the sequence has already."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


# First bytes of a msgpack map: with a count of 16 bits behind it, and with one of 4 bits in it.
_MAP_16: Final = 0xDE
_FIXED_MAP: Final = 0x80
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Options)


def encode_options(options: Options) -> bytes:
    """Return the msgpack map; empty bytes when every field has its default."""
    encoded = _ENCODER.encode(options)
    if encoded[0] == _MAP_16 and encoded[1] == 0 and encoded[2] < 16:
        # The encoder sizes the head of a map by all fields there are; few are ever set.
        encoded = bytes((_FIXED_MAP | encoded[2],)) + encoded[3:]
    return b"" if encoded[0] == _FIXED_MAP else encoded


def decode_options(buffer: Buffer) -> Options:
    """Read options; no bytes at all means every default.  Raises RemoteProtocolError."""
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
        # An unknown key is quoted in the message: cut it, the peer chose its length.
        raise RemoteProtocolError(
            f"options: {error}"[:MAX_SHOWN], ErrorCode.INVALID_REQUEST
        ) from error
