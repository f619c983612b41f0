"""What a client may ask of a request: one msgpack map, every field optional.  SPEC 4.8.

Unknown keys are refused, values out of range are refused, and the error names the field.  A client
that sends no options at all is a valid client: it gets greedy decoding.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from wire.errors import ErrorCode, RemoteProtocolError
from wire.parts import Buffer

MAX_OPTIONS_BYTES: Final = 64 * 1024
MAX_STOP_TOKEN_IDS: Final = 256
MAX_TOP_LOGPROBS: Final = 20

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Options(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Sampling and limits of one request.

    `temperature` 0 is greedy.  `top_k` 0 and `top_p` 1 switch their filter off.  `seed` and
    `choice` key the counter-based generator: the same seed, choice and position draw the same
    number on every worker.  `max_tokens` counts every generated token, prefill's first included.
    `deadline_ms` counts from the moment the frame is read.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    choice: Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)] = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Options)


def encode_options(options: Options) -> bytes:
    """Return the msgpack map; empty bytes when every field has its default."""
    encoded = _ENCODER.encode(options)
    return b"" if encoded == b"\x80" else encoded


def decode_options(buffer: Buffer) -> Options:
    """Read options; no bytes at all means every default.

    Raises:
        RemoteProtocolError: Code INVALID_REQUEST; the message names the field and its range.
    """
    if len(buffer) == 0:
        return Options()
    if len(buffer) > MAX_OPTIONS_BYTES:
        raise RemoteProtocolError(
            f"options are {len(buffer)} bytes, over the limit of {MAX_OPTIONS_BYTES}",
            ErrorCode.INVALID_REQUEST,
        )
    try:
        return _DECODER.decode(buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # An unknown key is quoted in the message: cut it, the peer chose its length.
        raise RemoteProtocolError(f"options: {error}"[:300], ErrorCode.INVALID_REQUEST) from error
