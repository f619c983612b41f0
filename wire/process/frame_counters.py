"""Count sent and received frames by tag, and dropped frames by reason.

Messages in the format of `wire.parts` are counted without decoding them.  All unknown tags share
one entry, so that a peer cannot make the table grow.
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
    """The frame counts of one plane, that is, of one kind of connection.

    Attributes:
        sent, received: Frame counts by tag; every header of a DECODE_TOKEN message counts.
        dropped: Counts of unsent frames, by the label of the error code.
        count_sent: To be called with the parts of each message that is sent or queued.
        count_received: To be called with the parts of each received message.
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
        """Count a message that could not be sent."""
        self.dropped[error.code.label] += 1

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """Yield (tag name, direction, number of frames)."""
        for direction, counts in (("sent", self.sent), ("received", self.received)):
            for tag, count in tuple(counts.items()):
                yield NAMES[tag], direction, count


def _count(frames: Counter[int], parts: Sequence[Buffer]) -> None:
    tag, num_frames = UNKNOWN, 1
    if len(parts) >= 2 and len(parts[0]) == TAG.size:
        (number,) = TAG.unpack(parts[0])
        if number in NAMES:
            tag, num_frames = number, max(1, len(parts[1]) // HEADER_BYTES)
    frames[tag] += num_frames
