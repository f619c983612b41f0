"""Faults of the KV plane that TCP never has, and that a transfer must survive.

Segments and ACKs come twice or in another order, CANCEL and ERROR come twice, bytes of a segment
change on the way.  An offer is left alone, but for the KV that comes with it: it is what everything
else refers to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from struct import unpack_from
from typing import Final, TypeVar

from wire.frames import Tag
from wire.parts import Buffer

T = TypeVar("T")
_TWICE: Final = {int(Tag.KV_CACHE_ACK), int(Tag.CANCEL), int(Tag.ERROR)}


def kind_of(parts: Sequence[Buffer]) -> tuple[int, int]:
    """Return the tag and the request id of a message; tag 0 for an offer or a keepalive."""
    (tag,) = unpack_from("<I", parts[0])
    request_id, segment = unpack_from("<QI", parts[1])
    return (0 if tag == Tag.KV_CACHE and segment == 0 else tag), request_id


@dataclass
class Mischief:
    """How often, as probabilities."""

    random: Random
    twice: float = 0.0
    swapped: float = 0.0
    corrupt: float = 0.0

    def copies(self, parts: Sequence[Buffer]) -> list[Sequence[Buffer]]:
        """Return what arrives of a message."""
        tag, _ = kind_of(parts)
        has_kv = tag == Tag.KV_CACHE or (tag == 0 and len(parts) > 3)
        if has_kv and self.random.random() < self.corrupt:
            kv = bytearray(parts[-1])
            kv[self.random.randrange(len(kv))] ^= 1
            parts = [*parts[:-1], bytes(kv)]
        if (tag == Tag.KV_CACHE or tag in _TWICE) and self.random.random() < self.twice:
            return [parts, parts]
        return [parts]

    def swap(self, queue: deque[tuple[Sequence[Buffer], T] | None]) -> None:
        """Let the last message overtake the one before it, if they are of one kind."""
        if len(queue) < 2 or self.random.random() >= self.swapped:
            return
        before, last = queue[-2], queue[-1]
        if before is None or last is None:
            return
        kind = kind_of(last[0])
        if kind == kind_of(before[0]) and kind[0] in (Tag.KV_CACHE, Tag.KV_CACHE_ACK):
            queue[-2], queue[-1] = last, before
