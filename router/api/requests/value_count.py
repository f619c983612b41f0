"""Limits the number of values in a body before it is decoded.

Decoding holds the GIL, and four megabytes of ``[],[],…`` become a million objects, which would
block the event loop.  Counting takes a few milliseconds, in steps between which the loop can run.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from router.api.errors import HttpError

# Limits for one body.  A message has five objects; a prompt of ids has one number per token.
MAX_OBJECTS: Final = 32 * 1024
MAX_NUMBERS: Final = 256 * 1024
# How many bytes are counted in one step.
STEP_BYTES: Final = 1 << 18


class Values(NamedTuple):
    """`objects` counts strings (including keys), arrays and objects; `commas` separate values."""

    objects: int
    commas: int


def check_values(raw: bytes) -> None:
    """Refuse a body with too many values to decode without blocking the event loop."""
    if len(raw) <= MAX_OBJECTS:
        return
    values = count_values(raw)
    for number, limit, noun in (
        (values.objects, MAX_OBJECTS, "strings, arrays and objects"),
        (values.commas, MAX_NUMBERS, "values"),
    ):
        if number > limit:
            raise HttpError(
                413,
                f"the body has over {limit} {noun}: send less at a time",
                code="too_many_values",
            )


def count_values(raw: bytes, step_bytes: int = STEP_BYTES) -> Values:
    """Count the values of a JSON text exactly, but stop once a limit is exceeded."""
    quotes = brackets = commas = 0
    is_in_string = False
    carry = b""
    for start in range(0, len(raw), step_bytes):
        # Remove escaped backslashes, then escaped quotes.  A backslash at the end of a step may
        # escape the first byte of the next one, so it is carried over.
        step = (carry + raw[start : start + step_bytes]).replace(rb"\\", b"")
        carry = step[-1:] if step.endswith(b"\\") else b""
        parts = step.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[is_in_string::2])
        quotes += len(parts) - 1
        is_in_string = quotes % 2 == 1
        brackets += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        if quotes // 2 + brackets > MAX_OBJECTS or commas > MAX_NUMBERS:
            break
    return Values(quotes // 2 + brackets, commas)
