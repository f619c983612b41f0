"""Log-probabilities on the wire: of one generated token a map, of a whole prompt packed words.

A prompt's have a fixed little-endian layout: a map would cost 20 bytes more a token.  SPEC 4.2,
4.6.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from struct import Struct
from typing import Annotated, Final

import msgspec

from wire.errors import RemoteProtocolError
from wire.maps import Map
from wire.options import MAX_TOP_LOGPROBS
from wire.parts import Buffer

# What a log-probability may be: JSON has no infinity, and rounding may lift one a little over 0.
LEAST_LOGPROB: Final = -9999.0
MOST_LOGPROB: Final = 0.01
# PREFILL_DONE has to fit the 1 MiB of a frame on raw TCP, with everything else it holds.
MAX_PROMPT_LOGPROBS_BYTES: Final = 15 << 16
_NUM_TOP: Final = Struct("<I")
_U32_MAX: Final = 2**32 - 1

Logprob = Annotated[float, msgspec.Meta(ge=LEAST_LOGPROB, le=MOST_LOGPROB)]
Top = tuple[Annotated[int, msgspec.Meta(ge=0, le=_U32_MAX)], Logprob]
PackedLogprobs = Annotated[
    bytes, msgspec.Meta(max_length=_NUM_TOP.size + MAX_PROMPT_LOGPROBS_BYTES)
]


class Logprobs(Map, frozen=True, kw_only=True):
    """Log-probability of one token and of the likeliest ones at its position (id, logprob)."""

    logprob: Logprob
    top: Annotated[tuple[Top, ...], msgspec.Meta(max_length=MAX_TOP_LOGPROBS)] = ()


def prompt_logprobs_problem(seq_len: int, num_top: int | None) -> str | None:
    """Say why the logprobs of such a prompt cannot be sent, if so; `num_top` None wants none."""
    if num_top is None or (size := (seq_len - 1) * _row(num_top).size) <= MAX_PROMPT_LOGPROBS_BYTES:
        return None
    return (
        f"prompt_logprobs {num_top} of {seq_len} tokens are {size} bytes, over the limit of "
        f"{MAX_PROMPT_LOGPROBS_BYTES}; ask for fewer, or for a shorter prompt"
    )


def join_prompt_logprobs(num_top: int, rows: Iterable[bytes]) -> bytes:
    """Join packed rows, one for each prompt token but the first, behind their number of tops."""
    return _NUM_TOP.pack(num_top) + b"".join(rows)


def pack_logprobs(logprobs: Logprobs) -> bytes:
    """Pack one row: ``f32 logprob`` then ``(u32 token id, f32 logprob)`` for each of the top."""
    words = [number for pair in logprobs.top for number in pair]
    return _row(len(logprobs.top)).pack(logprobs.logprob, *words)


def check_prompt_logprobs(packed: Buffer) -> None:
    """Raise RemoteProtocolError unless these are whole rows, of at most 20 tops, all in range."""
    if len(packed) < _NUM_TOP.size:
        raise RemoteProtocolError(f"prompt_logprobs has {len(packed)} bytes, not >= 4")
    (num_top,) = _NUM_TOP.unpack_from(packed)
    # Before it is multiplied into a struct: the peer chose the number.
    if num_top > MAX_TOP_LOGPROBS:
        raise RemoteProtocolError(f"prompt_logprobs: {num_top} tops, over {MAX_TOP_LOGPROBS}")
    rows_bytes = len(packed) - _NUM_TOP.size
    if rows_bytes % (4 + 8 * num_top):
        raise RemoteProtocolError(f"prompt_logprobs: {rows_bytes} bytes are no rows of {num_top}")
    width, floats = 1 + 2 * num_top, memoryview(packed)[_NUM_TOP.size :].cast("f")
    for start in (0, *range(2, width, 2)):
        column = floats[start::width]
        # A NaN hides from min and max, but not from a sum.
        if len(column) and not (
            min(column) >= LEAST_LOGPROB and max(column) <= MOST_LOGPROB and isfinite(sum(column))
        ):
            raise RemoteProtocolError("prompt_logprobs: a log-probability is out of range")


def num_rows(packed: Buffer, num_top: int) -> int:
    """Return how many rows these checked bytes have; -1 if their tops are more than `num_top`."""
    (has_top,) = _NUM_TOP.unpack_from(packed)
    return -1 if has_top > num_top else (len(packed) - _NUM_TOP.size) // _row(has_top).size


def largest_top_token_id(packed: Buffer) -> int:
    """Return the largest token id among the tops of checked rows, -1 when they have none."""
    (num_top,) = _NUM_TOP.unpack_from(packed)
    width, words = 1 + 2 * num_top, memoryview(packed)[_NUM_TOP.size :].cast("I")
    return max([max(words[start::width], default=-1) for start in range(1, width, 2)], default=-1)


def unpack_prompt_logprobs(packed: Buffer) -> list[Logprobs]:
    """Read the rows: of the prompt's second token, the third, and so on.

    Raises:
        RemoteProtocolError: These are no whole rows.
    """
    check_prompt_logprobs(packed)
    if len(packed) == _NUM_TOP.size:
        return []
    (num_top,) = _NUM_TOP.unpack_from(packed)
    rows = _row(num_top).iter_unpack(memoryview(packed)[_NUM_TOP.size :])
    return [
        Logprobs(logprob=row[0], top=tuple(zip(row[1::2], row[2::2], strict=True))) for row in rows
    ]


def _row(num_top: int) -> Struct:
    return Struct("<f" + "If" * num_top)
