"""Bounds the number of values in a body, before it is decoded.

Decoding holds the GIL, and four megabytes of ``[],[],…`` become a million objects: the event loop
would wait for all of them.  Counting takes a few milliseconds, in steps between which it may run.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from router.api.errors import HttpError

# Of one body.  A message has five of the first, a prompt of ids one of the second for each token.
MAX_OBJECTS: Final = 32 * 1024
MAX_NUMBERS: Final = 256 * 1024
# Counted in one step.
STEP_BYTES: Final = 1 << 18


class Values(NamedTuple):
    """`objects` are strings, keys included, arrays and objects; `commas` separate all values."""

    objects: int
    commas: int


def check_values(raw: bytes) -> None:
    """Refuse a body of more values than can be decoded without holding up others."""
    if len(raw) <= MAX_OBJECTS:
        return
    values = count_values(raw)
    for number, limit, what in (
        (values.objects, MAX_OBJECTS, "strings, arrays and objects"),
        (values.commas, MAX_NUMBERS, "values"),
    ):
        if number > limit:
            raise HttpError(
                413,
                f"the body has over {limit} {what}: send less at a time",
                code="too_many_values",
            )


def count_values(raw: bytes, step_bytes: int = STEP_BYTES) -> Values:
    """Count the values of a JSON text, exactly, up to just over the limits, where it stops."""
    quotes = brackets = commas = 0
    is_in_string = False
    carry = b""
    for start in range(0, len(raw), step_bytes):
        # A backslash escapes the byte after it, which may be another one: pairs go first, then what
        # is escaped by a single one.  The last byte of a step may escape the first of the next.
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
