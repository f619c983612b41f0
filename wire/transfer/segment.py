"""Segments: the rectangles of layers by heads by tokens in which a KV cache travels.  SPEC 6.3.

The sender cuts what is to be sent with `plan`; the receiver trusts no plan: `Coverage` admits any
rectangles that lie inside the transfer and overlap nothing, as long as the layer ranges of a group
are the same or apart, and its head ranges too.  So one list of token ranges for each layer range
with each head range says what has come, in whatever order; adjacent token ranges are merged, which
keeps it short.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.layout import Group, KVGroup, KVLayout
from wire.parts import Buffer

MIB: Final = 1 << 20
# Measured on loopback: 256 KiB messages lose a third of the bandwidth, 32 MiB more than half.
DEFAULT_SEGMENT_BYTES: Final = 2 * MIB
MAX_SEGMENT_BYTES: Final = 4 * MIB
# 64 GiB in segments of 1 MiB; bounds what a receiver remembers of one transfer.
MAX_SEGMENTS: Final = 65_536


class Rectangle(NamedTuple):
    """Some heads of some layers of one group, at some tokens.

    `layers` count within the group.  Of a state, `tokens` is empty and begins at its position.
    """

    group: int
    layers: range
    heads: range
    tokens: range

    def num_bytes(self, layout: KVLayout) -> int:
        """KV bytes inside this rectangle."""
        group = layout.groups[self.group]
        num_positions = len(self.tokens) if isinstance(group, KVGroup) else 1
        return len(self.layers) * len(self.heads) * num_positions * group.head_bytes


class SegmentDescriptor(NamedTuple):
    """First payload part of a KV segment: which rectangle, how many bytes, their digest.  SPEC 6.3.

    The bytes of keys and values are ``[layer][k, then v][kv_head][token][dim]``, those of a state
    ``[layer][head]``.  `digest` is XXH3-64 of them, seeded with the request id.  `idle_us` says for
    how long the sender had nothing to send before this segment: without it nobody could tell a slow
    link from a slow prompt.
    """

    group: int
    head_start: int
    num_heads: int
    layer_start: int
    num_layers: int
    token_start: int
    num_tokens: int
    num_bytes: int
    digest: int
    idle_us: int = 0

    @classmethod
    def of(
        cls, rectangle: Rectangle, num_bytes: int, digest: int, idle_us: int = 0
    ) -> SegmentDescriptor:
        group, layers, heads, tokens = rectangle
        return cls(
            group,
            *(heads.start, len(heads)),
            *(layers.start, len(layers)),
            *(tokens.start, len(tokens)),
            *(num_bytes, digest, idle_us),
        )

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(
            self.group,
            range(self.layer_start, self.layer_start + self.num_layers),
            range(self.head_start, self.head_start + self.num_heads),
            range(self.token_start, self.token_start + self.num_tokens),
        )

    def pack(self) -> bytes:
        return DESCRIPTOR.pack(*self[:3], 0, *self[3:])

    @classmethod
    def unpack(cls, buffer: Buffer) -> SegmentDescriptor:
        """Read a descriptor.

        Raises:
            RemoteProtocolError: Not exactly `DESCRIPTOR.size` bytes, or a reserved field is not 0.
        """
        if len(buffer) != DESCRIPTOR.size:
            raise RemoteProtocolError(
                f"the segment descriptor has {len(buffer)} bytes, not {DESCRIPTOR.size}"
            )
        group, head_start, num_heads, zero, *rest = DESCRIPTOR.unpack(buffer)
        if zero:
            raise RemoteProtocolError(f"segment descriptor: reserved field is {zero}, not 0")
        return cls(group, head_start, num_heads, *rest)


DESCRIPTOR: Final = Struct("<HHHHIIIIQQQ")


def segment_digest(request_id: int, kv: Buffer) -> int:
    """XXH3-64 of a segment's bytes, seeded with the request id: no segment fits another request."""
    return xxh3_64_intdigest(kv, seed=request_id)


def split_segment(body: Buffer) -> tuple[SegmentDescriptor, memoryview]:
    """Split the one payload of a KV segment, as raw TCP carries it, without copying the KV.

    Raises:
        RemoteProtocolError: Too short for a descriptor.
    """
    view = memoryview(body)
    return SegmentDescriptor.unpack(view[: DESCRIPTOR.size]), view[DESCRIPTOR.size :]


def plan(
    layout: KVLayout,
    cached_tokens: int,
    num_tokens: int,
    segment_bytes: int,
    num_shards: int = 1,
    stages: Sequence[Sequence[range]] | None = None,
) -> list[Rectangle]:
    """Cut what is sent of `num_tokens` into rectangles of at most `segment_bytes`.

    Of a group whole rows (all layers of some tokens) when one fits, else some layers of single
    tokens; in the order in which prompt chunks are computed.  No rectangle is in two places.

    Args:
        num_shards: In how many places side by side the heads of a layer are.
        stages: Of each group, which of its layers are in one place; None: all of them.

    Raises:
        LocalProtocolError: Not even one layer at one position fits, or it takes over
            `MAX_SEGMENTS`.
    """
    if segment_bytes < layout.piece_bytes:
        raise LocalProtocolError(
            f"a segment of {segment_bytes} bytes is too small for one layer of one token or state "
            f"({layout.piece_bytes} bytes)"
        )
    if cached_tokens == num_tokens:
        return []
    cuts = []
    for index, group in enumerate(layout.groups):
        layers = [range(group.num_layers)] if stages is None else stages[index]
        tokens = group.sent(cached_tokens, num_tokens)
        cuts.append(_Cut.of(index, group, layers, tokens, segment_bytes, num_shards))
    num_segments = sum(cut.num_segments for cut in cuts)
    if num_segments > MAX_SEGMENTS:
        raise LocalProtocolError(f"{num_segments} segments of {segment_bytes} bytes are too many")
    rectangles = [rectangle for cut in cuts for rectangle in cut.rectangles()]
    return sorted(rectangles, key=lambda rectangle: rectangle.tokens.stop)


class _Cut(NamedTuple):
    """How one group is cut: into so many layers and tokens at a time, the same for all shares."""

    group: int
    layers: list[range]
    tokens: range
    shares: list[range]  # of the heads
    num_tokens: int
    num_segments: int

    @classmethod
    def of(
        cls,
        index: int,
        group: Group,
        stages: Sequence[range],
        tokens: range,
        segment_bytes: int,
        num_shards: int,
    ) -> _Cut:
        shares, longest = _shares(group.num_heads, num_shards), max(map(len, stages))
        piece_bytes = max(map(len, shares)) * group.head_bytes
        num_layers = min(longest, segment_bytes // piece_bytes)
        layers = [piece for stage in stages for piece in _pieces(stage, num_layers)]
        num_tokens = max(1, segment_bytes // (longest * piece_bytes))
        token_pieces = -(-len(tokens) // num_tokens) if isinstance(group, KVGroup) else 1
        num_segments = len(shares) * len(layers) * token_pieces
        return cls(index, layers, tokens, shares, num_tokens, num_segments)

    def rectangles(self) -> list[Rectangle]:
        if not self.num_segments:
            return []  # a window of one position: no token sees another
        return [
            Rectangle(self.group, layers, heads, tokens)
            for tokens in _pieces(self.tokens, self.num_tokens)
            for heads in self.shares
            for layers in self.layers
        ]


def _shares(num_heads: int, num_shards: int) -> list[range]:
    """Return the heads of each shard; where there are fewer heads than shards, some have none."""
    num_shards = min(num_shards, num_heads)
    starts = [num_heads * shard // num_shards for shard in range(num_shards + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _pieces(whole: range, step: int) -> list[range]:
    """Cut a range; an empty one, the position of a state, is one piece."""
    return [whole[first : first + step] for first in range(0, len(whole), step)] or [whole]


class Coverage:
    """Which part of a transfer has been admitted; nothing is admitted twice."""

    def __init__(self, layout: KVLayout, cached_tokens: int, num_tokens: int) -> None:
        self.books = [Book(group, group.sent(cached_tokens, num_tokens)) for group in layout.groups]

    def admit(self, rectangle: Rectangle) -> None:
        """Note a rectangle.

        Raises:
            RemoteProtocolError: It is empty, leaves the transfer, overlaps an earlier one or cuts
                layers or heads otherwise; nothing is noted then.
        """
        if rectangle.group >= len(self.books):
            raise RemoteProtocolError(
                f"KV_CACHE: {rectangle} is of none of the {len(self.books)} groups"
            )
        self.books[rectangle.group].admit(rectangle)


class Book:
    """What of one group has been admitted."""

    def __init__(self, group: Group, tokens: range) -> None:
        self._is_state = not isinstance(group, KVGroup)
        self._layers, self._heads = range(group.num_layers), range(group.num_heads)
        self._tokens = tokens
        self._layer_cuts: set[range] = set()
        self._head_cuts: set[range] = set()
        # Layers and heads -> token ranges, which are ascending and apart; adjacent ones are merged.
        self.admitted: dict[tuple[range, range], list[tuple[int, int]]] = {}

    def admit(self, rectangle: Rectangle) -> None:
        """See `Coverage.admit`."""
        self._check(rectangle)
        _, layers, heads, tokens = rectangle
        ranges = self.admitted.get((layers, heads), [])
        start, end = tokens.start, tokens.stop + self._is_state  # a state takes its place once
        after = bisect_left(ranges, (start, end))
        #   ranges[after - 1]      [start, end)      ranges[after]
        earlier_end = ranges[after - 1][1] if after > 0 else start
        later_start = ranges[after][0] if after < len(ranges) else end
        if earlier_end > start or later_start < end:
            raise RemoteProtocolError(f"KV_CACHE: {rectangle} overlaps an earlier segment")
        if after < len(ranges) and ranges[after][0] == end:
            end = ranges.pop(after)[1]
        if after > 0 and ranges[after - 1][1] == start:
            after -= 1
            start = ranges.pop(after)[0]
        ranges.insert(after, (start, end))
        self.admitted[layers, heads] = ranges
        self._layer_cuts.add(layers)
        self._head_cuts.add(heads)

    def _check(self, rectangle: Rectangle) -> None:
        _, layers, heads, tokens = rectangle
        if not layers or not heads or not (tokens or self._is_state):
            raise RemoteProtocolError(f"KV_CACHE: {rectangle} is empty")
        if (
            layers.stop > self._layers.stop
            or heads.stop > self._heads.stop
            or tokens.start < self._tokens.start
            or tokens.stop > self._tokens.stop
        ):
            raise RemoteProtocolError(
                f"KV_CACHE: {rectangle} leaves {self._layers}, {self._heads}, {self._tokens}"
            )
        for cut, known, what in (
            (layers, self._layer_cuts, "layers"),
            (heads, self._head_cuts, "heads"),
        ):
            if cut not in known and any(_overlap(cut, other) for other in known):
                raise RemoteProtocolError(
                    f"KV_CACHE: {rectangle} cuts the {what} differently from earlier segments"
                )


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
