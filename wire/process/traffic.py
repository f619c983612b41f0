"""How many frames crossed one kind of socket: by tag and direction, and those that did not cross.

Counts messages as `wire.parts` lays them out, without decoding them.  All tags that do not exist
are one entry, so that a peer cannot make the table grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from wire.errors import WireError
from wire.frames import HEADER_BYTES, Tag
from wire.parts import TAG, Buffer

UNKNOWN: Final = 0
NAMES: Final = {UNKNOWN: "unknown"} | {tag.value: tag.name.lower() for tag in Tag}


class Traffic:
    """The frames of one plane.

    Attributes:
        sent, received: Frames by tag; each DECODE_TOKEN of a message is one.
        dropped: Frames that were not sent, by the label of the reason's code.
    """

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.dropped: Counter[str] = Counter()

    def say(self, parts: Sequence[Buffer]) -> None:
        """A message was sent, or waits in a queue to be."""
        tag, count = _frames(parts)
        self.sent[tag] += count

    def hear(self, parts: Sequence[Buffer]) -> None:
        """A message came, whatever becomes of it."""
        tag, count = _frames(parts)
        self.received[tag] += count

    def drop(self, error: WireError) -> None:
        """A message could not be sent."""
        self.dropped[error.code.label] += 1

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """Yield the name of each tag seen, the direction, and the number of frames."""
        for direction, counts in (("sent", self.sent), ("received", self.received)):
            for tag, count in tuple(counts.items()):
                yield NAMES[tag], direction, count


def _frames(parts: Sequence[Buffer]) -> tuple[int, int]:
    if len(parts) < 2 or len(parts[0]) != TAG.size:
        return UNKNOWN, 1
    (tag,) = TAG.unpack(parts[0])
    return (tag, max(1, len(parts[1]) // HEADER_BYTES)) if tag in NAMES else (UNKNOWN, 1)
