"""Counts frames of one kind of socket by tag and direction, and those dropped.

Counts messages as `wire.parts` lays them out, without decoding them.  All tags that do not exist
are one entry, so that a peer cannot make the table grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
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
        count_sent: Called with the parts of each message sent or queued.
        count_received: Called with the parts of each message received.
    """

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.dropped: Counter[str] = Counter()
        self.count_sent, self.count_received = (
            partial(_count, self.sent),
            partial(_count, self.received),
        )

    def drop(self, error: WireError) -> None:
        """A message could not be sent."""
        self.dropped[error.code.label] += 1

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """Yield the name of each tag seen, the direction, and the number of frames."""
        for direction, counts in (("sent", self.sent), ("received", self.received)):
            for tag, count in tuple(counts.items()):
                yield NAMES[tag], direction, count


def _count(frames: Counter[int], parts: Sequence[Buffer]) -> None:
    tag, num_frames = UNKNOWN, 1
    if len(parts) >= 2 and len(parts[0]) == TAG.size:
        (said,) = TAG.unpack(parts[0])
        if said in NAMES:
            tag, num_frames = said, max(1, len(parts[1]) // HEADER_BYTES)
    frames[tag] += num_frames
