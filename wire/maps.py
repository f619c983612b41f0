"""Each key of a map comes once.  SPEC 1.2.

msgspec takes the last of two values, another reader may take the first, and both would go on with
different requests.  msgspec can not be told to refuse, so the keys are counted beside it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from wire.parts import Buffer

_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_ARRAY: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


def check_keys(buffer: Buffer) -> None:
    """Refuse a repeated key: in a map, in maps within it, in the maps of an array.

    `buffer` was decoded already, so it is one whole msgpack value.

    Raises:
        msgspec.ValidationError: A key is there twice.
    """
    view = memoryview(buffer)
    head = view[0]
    if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
        for item in _ARRAY.decode(view):
            check_keys(item)
        return
    if not _is_map(head):
        return
    # The count is in the head, or in the 2 or 4 bytes behind it.
    width = {0xDE: 2, 0xDF: 4}.get(head)
    count = head & 0x0F if width is None else int.from_bytes(view[1 : 1 + width], "big")
    values = _MAP.decode(view)
    if len(values) != count:
        raise msgspec.ValidationError("a key is there twice")
    for value in values.values():
        if _is_map(memoryview(value)[0]):  # no payload has maps in an array in a map
            check_keys(value)


def _is_map(head: int) -> bool:
    return 0x80 <= head <= 0x8F or head in (0xDE, 0xDF)
