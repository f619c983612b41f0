"""Segments: the rectangles of layers by heads by tokens in which a KV cache travels.  SPEC 6.3.

The sender cuts a transfer with `plan`; the receiver trusts no plan: `Coverage` admits rectangles
inside the transfer that overlap no earlier one, if the layer ranges of a group are equal or
disjoint, and its head ranges too.  So one list of merged token ranges per layer range and head
range suffices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import KvCache
from wire.layout import Group, KVGroup, KVLayout, layer_bytes
from wire.parts import Buffer

MIB: Final = 1 << 20
# Measured on loopback: 256 KiB messages lose a third of the bandwidth, 32 MiB more than half.
DEFAULT_SEGMENT_BYTES: Final = 2 * MIB
MAX_SEGMENT_BYTES: Final = 4 * MIB
# Of a segment in memory, which is not buffered.  The receiver's credit sets the size: 16 MiB
# between CPUs (with a quarter of it a transfer takes a quarter longer), more between GPUs (10 us a
# copy).
MAX_READ_BYTES: Final = 256 * MIB
# A block from this size on is sent alone: packing several costs more than another segment.
ALONE_BYTES: Final = MIB // 2
# 64 GiB in segments of 1 MiB; bounds what a receiver remembers of one transfer.
MAX_SEGMENTS: Final = 65_536
# With an offer: it is one message, whose parts are few.
MAX_UNASKED_SEGMENTS: Final = 16


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

    def pieces(self, number: int) -> list[Rectangle]:
        """Return it cut into so many pieces of as many tokens; `number` divides the tokens."""
        if number == 1:
            return [self]
        step = len(self.tokens) // number
        return [self._replace(tokens=tokens) for tokens in _pieces(self.tokens, step)]


class SegmentDescriptor(NamedTuple):
    """First payload part of a KV segment: which rectangle, how many bytes, their digest.  SPEC 6.3.

    Keys and values are ``[layer][k, then v][kv_head][token][dim]``, states ``[layer][head]``.
    `digest` is XXH3-64, seeded with the request id.  `idle_us` is the sender's idle time before
    this segment, which tells a slow prompt from a slow link.  `in_memory` is 1 if the second part
    is the addresses of the bytes in shared memory (`pack_places`).
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
    in_memory: int = 0

    @classmethod
    def of(
        cls,
        rectangle: Rectangle,
        num_bytes: int,
        digest: int,
        idle_us: int = 0,
        in_memory: int = 0,
    ) -> SegmentDescriptor:
        group, layers, heads, tokens = rectangle
        return cls(
            group,
            *(heads.start, len(heads)),
            *(layers.start, len(layers)),
            *(tokens.start, len(tokens)),
            *(num_bytes, digest, idle_us, in_memory),
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
        return DESCRIPTOR.pack(*self[:3], self.in_memory, *self[3:-1])

    @classmethod
    def unpack(cls, buffer: Buffer) -> SegmentDescriptor:
        """Read a descriptor.  Raises RemoteProtocolError."""
        if len(buffer) != DESCRIPTOR.size:
            raise RemoteProtocolError(
                f"the segment descriptor has {len(buffer)} bytes, not {DESCRIPTOR.size}"
            )
        group, head_start, num_heads, in_memory, *rest = DESCRIPTOR.unpack(buffer)
        if in_memory not in (0, 1):
            raise RemoteProtocolError(f"segment descriptor: in_memory is {in_memory}, not 0 or 1")
        return cls(group, head_start, num_heads, *rest)._replace(in_memory=in_memory)


DESCRIPTOR: Final = Struct("<HHHHIIIIQQQ")


def segment_digest(request_id: int, kv: Buffer) -> int:
    """XXH3-64 of a segment's bytes, seeded with the request id: no segment fits another request."""
    return xxh3_64_intdigest(kv, seed=request_id)


def running_digest(request_id: int) -> xxh3_64:
    """Return the digest of a segment that is fed with its bytes part by part."""
    return xxh3_64(seed=request_id)


def pack_places(places: Sequence[int]) -> bytes:
    """Return the second part of a segment in memory: the address of each piece.  SPEC 6.8."""
    return Struct(f"<{len(places)}Q").pack(*places)


def unpack_places(buffer: Buffer) -> tuple[int, ...]:
    """Read the places of a segment's pieces.  Raises RemoteProtocolError: they are not u64."""
    number, rest = divmod(len(buffer), 8)
    if rest:
        raise RemoteProtocolError(f"the places of a segment have {len(buffer)} bytes, not n x 8")
    return Struct(f"<{number}Q").unpack(buffer)


def split_segment(body: Buffer) -> tuple[SegmentDescriptor, memoryview]:
    """Split the one payload of a KV segment, as raw TCP carries it, without copying the KV.

    Raises:
        RemoteProtocolError: Too short for a descriptor.
    """
    view = memoryview(body)
    return SegmentDescriptor.unpack(view[: DESCRIPTOR.size]), view[DESCRIPTOR.size :]


def unasked_segments(
    frame: KvCache, payload: Sequence[Buffer], most_bytes: int
) -> list[tuple[Buffer, Buffer]]:
    """Return the two parts of each segment in an offer, whose first part is the map.

    Raises:
        RemoteProtocolError: They are not as many as the header says, or over `most_bytes`.
    """
    number, parts = frame.num_segments, payload[1:]
    if number > MAX_UNASKED_SEGMENTS or (number and len(parts) != 2 * number):
        raise RemoteProtocolError(
            f"KV_CACHE: {number} segments with an offer in {len(parts)} parts"
        )
    if not number:
        return []
    segments = list(zip(parts[::2], parts[1::2], strict=True))
    num_bytes = sum(memoryview(kv).nbytes for _, kv in segments)
    if num_bytes > most_bytes:
        raise RemoteProtocolError(
            f"KV_CACHE: {num_bytes} bytes of KV with an offer, {most_bytes} are taken unasked"
        )
    if any(len(descriptor) != DESCRIPTOR.size for descriptor, _ in segments):
        raise RemoteProtocolError(
            f"KV_CACHE: a segment descriptor with an offer has not {DESCRIPTOR.size} bytes"
        )
    return segments


def plan(
    layout: KVLayout,
    cached_tokens: int,
    num_tokens: int,
    segment_bytes: int,
    num_shards: int = 1,
    stages: Sequence[Sequence[range]] | None = None,
    block_size: int = 1,
    read_bytes: int = 0,
) -> list[Rectangle]:
    """Cut what is sent of `num_tokens` into rectangles of at most `segment_bytes`.

    A rectangle has all layers of whole blocks, of one block if it is large; else some layers of one
    block or token.  They are in the order in which prompt chunks are computed.

    Args:
        block_size: Tokens of the sender's blocks.
        read_bytes: Size of rectangles of whole blocks that the receiver reads in memory; 0: none.
        num_shards: Number of processes that share the heads of a layer.
        stages: For each group, the layers of each process; None: all are in one.

    Raises:
        LocalProtocolError: Not even one layer at one position fits, or it takes over
            `MAX_SEGMENTS`.
    """
    if cached_tokens == num_tokens:
        return []
    cuts = []
    for index, group in enumerate(layout.groups):
        tokens = group.sent(cached_tokens, num_tokens)
        if isinstance(group, KVGroup) and not tokens:
            continue  # a window of one position: no token sees another
        if segment_bytes < layer_bytes(group):
            raise LocalProtocolError(
                f"a segment of {segment_bytes} bytes is too small for one layer of one token or "
                f"state ({layer_bytes(group)} bytes)"
            )
        layers = [range(group.num_layers)] if stages is None else stages[index]
        cuts.append(
            _Cut.of(index, group, layers, tokens, segment_bytes, num_shards, block_size, read_bytes)
        )
    num_segments = sum(cut.num_segments for cut in cuts)
    if num_segments > MAX_SEGMENTS:
        raise LocalProtocolError(f"{num_segments} segments of {segment_bytes} bytes are too many")
    rectangles = [rectangle for cut in cuts for rectangle in cut.rectangles()]
    return sorted(rectangles, key=lambda rectangle: rectangle.tokens.stop)


class _Cut(NamedTuple):
    """How one group is cut: into so many layers and tokens at a time, the same for all shares."""

    group: int
    layers: list[range]
    shares: list[range]  # of the heads
    runs: list[range]  # of tokens; each is cut by itself
    num_tokens: int
    block_size: int  # cuts are at multiples of it

    @classmethod
    def of(
        cls,
        index: int,
        group: Group,
        stages: Sequence[range],
        tokens: range,
        segment_bytes: int,
        num_shards: int,
        block_size: int,
        read_bytes: int,
    ) -> _Cut:
        shares, longest = _shares(group.num_heads, num_shards), max(map(len, stages))
        piece_bytes = max(map(len, shares)) * group.head_bytes
        if not isinstance(group, KVGroup) or block_size * piece_bytes > segment_bytes:
            block_size, read_bytes = 1, 0  # no rectangle has whole blocks
        most_layers = segment_bytes // (block_size * piece_bytes)
        num_layers = -(-longest // -(-longest // most_layers))
        layers = [piece for stage in stages for piece in _pieces(stage, num_layers)]
        block_bytes = block_size * longest * piece_bytes
        joined_bytes = read_bytes or (segment_bytes if block_bytes < ALONE_BYTES else 0)
        num_blocks = max(1, joined_bytes // block_bytes)
        runs = _whole_apart(tokens, block_size) if read_bytes else [tokens]
        return cls(index, layers, shares, runs, num_blocks * block_size, block_size)

    @property
    def num_segments(self) -> int:
        numbers = (-(-(run.stop - self._first(run)) // self.num_tokens) for run in self.runs)
        num_pieces = sum(max(1, number) for number in numbers)  # a state has no tokens, and is one
        return len(self.shares) * len(self.layers) * num_pieces

    def rectangles(self) -> list[Rectangle]:
        return [
            Rectangle(self.group, layers, heads, tokens)
            for run in self.runs
            for tokens in _pieces(run, self.num_tokens, self._first(run))
            for heads in self.shares
            for layers in self.layers
        ]

    def _first(self, run: range) -> int:
        """Return the start of the block that a run begins in."""
        return run.start // self.block_size * self.block_size


def _whole_apart(tokens: range, block_size: int) -> list[range]:
    """Split a token range at block boundaries into head, whole blocks and tail; omit empty ones.

    Only whole blocks can be read in memory.
    """
    #   tokens.start      first               end      tokens.stop
    #        |  of a block  |  whole blocks    |  of a block  |
    first = -(-tokens.start // block_size) * block_size
    end = tokens.stop // block_size * block_size
    if first > end:
        return [tokens]  # of one block
    runs = [range(tokens.start, first), range(first, end), range(end, tokens.stop)]
    return [run for run in runs if run]


def _shares(num_heads: int, num_shards: int) -> list[range]:
    """Return the heads of each shard; where there are fewer heads than shards, some have none."""
    num_shards = min(num_shards, num_heads)
    starts = [num_heads * shard // num_shards for shard in range(num_shards + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _pieces(whole: range, step: int, first: int | None = None) -> list[range]:
    """Cut a range at every `step` from `first` on, by default from where it begins.

    An empty one, the position of a state, is one piece.
    """
    first = whole.start if first is None else first
    cuts = range(first + step, whole.stop, step)
    return [range(a, b) for a, b in pairwise((whole.start, *cuts, whole.stop))]


class Coverage:
    """Which part of a transfer has been admitted; nothing is admitted twice."""

    def __init__(self, layout: KVLayout, cached_tokens: int, num_tokens: int) -> None:
        self.books = [Book(group, group.sent(cached_tokens, num_tokens)) for group in layout.groups]

    def admit(self, rectangle: Rectangle) -> None:
        """Note a rectangle.  Raises RemoteProtocolError."""
        if rectangle.group >= len(self.books):
            raise RemoteProtocolError(
                f"KV_CACHE: {rectangle} is of none of the {len(self.books)} groups"
            )
        self.books[rectangle.group].admit(rectangle)


class Book:
    """The rectangles of one group that have been admitted."""

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
