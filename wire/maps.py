"""Payload maps: msgpack maps with string keys, without unknown or repeated keys.  SPEC 1.2.

For a repeated key, msgspec keeps the last value and another decoder may keep the first.  msgspec
cannot reject repeated keys, so `check_keys` counts the keys after decoding.
"""

from __future__ import annotations

from typing import Final

import msgspec

from wire.parts import Buffer

_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_ARRAY: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Map(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base class for payloads that are msgpack maps."""


def check_keys(buffer: Buffer, *nested: str) -> None:
    """Raise msgspec.ValidationError if a map, or a map in an array, repeats a key.

    The values under the keys `nested` are checked too, recursively.  `buffer` must have been
    decoded successfully before, so it is one complete msgpack value of the right type.
    """
    view = memoryview(buffer)
    head = view[0]
    if 0x80 <= head <= 0x8F:
        count = head & 0x0F
    elif head == 0xDE or head == 0xDF:  # the next 2 or 4 bytes are the count
        count = int.from_bytes(view[1 : 3 if head == 0xDE else 5], "big")
    elif 0x90 <= head <= 0x9F or head == 0xDC or head == 0xDD:
        for item in _ARRAY.decode(view):
            check_keys(item, *nested)
        return
    else:
        return
    values = _MAP.decode(view)
    if len(values) != count:
        raise msgspec.ValidationError("a key is there twice")
    for key in nested:
        if key in values:
            check_keys(values[key], *nested)
