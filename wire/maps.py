"""Maps, as SPEC 1.2 means them: msgpack with string keys, none of them unknown, none there twice.

Of a repeated key msgspec takes the last value, another reader may take the first.  msgspec cannot
refuse it, so `check_keys` counts the keys after decoding.
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
    """Common parent of the payloads that are maps."""


def check_keys(buffer: Buffer, *nested: str) -> None:
    """Refuse a repeated key: in a map, in those under its keys `nested`, in an array of maps.

    In those below, the same keys are looked under.

    `buffer` was decoded already, so it is one whole msgpack value of the right kind.
    Raises msgspec.ValidationError.
    """
    view = memoryview(buffer)
    head = view[0]
    if 0x80 <= head <= 0x8F:
        count = head & 0x0F
    elif head == 0xDE or head == 0xDF:  # the count is in the 2 or 4 bytes behind it
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
