"""Segments: the rectangles (layers x heads x tokens) in which a KV cache is sent.  SPEC 6.3.

The sender splits a transfer with `plan`.  The receiver does not trust the plan: `Coverage` admits a
rectangle only if it is inside the transfer and overlaps no earlier one.  Within a group, the layer
ranges of any two rectangles must be equal or disjoint, and so must their head ranges.  Therefore
one list of merged token ranges per (layer range, head range) is enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
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
# The limit for a segment in shared memory, which needs no buffer.  The actual size depends on the
# receiver's credit: 16 MiB between CPUs (transfers with a quarter of that take a quarter longer),
# more between GPUs, where each copy costs 10 us.
MAX_READ_BYTES: Final = 256 * MIB
# Blocks of at least this size are sent one per segment: packing several into one segment would cost
# more than it saves.
ALONE_BYTES: Final = MIB // 2
# 64 GiB in segments of 1 MiB.  Limits the receiver's bookkeeping for one transfer.
MAX_SEGMENTS: Final = 65_536
# The limit for segments sent with an offer, which is one message with a limited number of parts.
MAX_UNASKED_SEGMENTS: Final = 16


class Rectangle(NamedTuple):
    """A part of the KV cache: ranges of layers, heads and tokens of one layer group.

    Layer numbers are relative to the group.  For a recurrent state, `tokens` is an empty range that
    starts at the state's position.
    """

    group: int
    layers: range
    heads: range
    tokens: range

    def num_bytes(self, layout: KVLayout) -> int:
        """Return the size of the rectangle's KV in bytes."""
        group = layout.groups[self.group]
        num_positions = len(self.tokens) if isinstance(group, KVGroup) else 1
        return len(self.layers) * len(self.heads) * num_positions * group.head_bytes

    def pieces(self, number: int) -> list[Rectangle]:
        """Split the rectangle into `number` chunks of equally many tokens."""
        if number == 1:
            return [self]
        step = len(self.tokens) // number
        return [self._replace(tokens=tokens) for tokens in _pieces(self.tokens, step)]


class SegmentDescriptor(NamedTuple):
    """First payload part of a KV segment: its rectangle, size and digest.  SPEC 6.3.

    The layout of keys and values is ``[layer][k, then v][kv_head][token][dim]``, that of states
    ``[layer][head]``.  `digest` is XXH3-64, seeded with the request id.  `idle_us` is how long the
    sender waited for prefill before this segment, to tell slow prefill from a slow network.
    `in_memory` is 1 if the second payload part has offsets into shared memory (`pack_places`)
    instead of the KV.
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
        cls, rectangle: Rectangle, num_bytes: int, digest: int, idle_us: int = 0, in_memory: int = 0
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
        """Decode a descriptor.  Raises RemoteProtocolError."""
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
    """Return the XXH3-64 of a segment's KV, seeded with the request id to bind it to that."""
    return xxh3_64_intdigest(kv, seed=request_id)


def running_digest(request_id: int) -> xxh3_64:
    """Return an incremental hasher that computes `segment_digest` chunk by chunk."""
    return xxh3_64(seed=request_id)


def pack_places(places: Sequence[int]) -> bytes:
    """Encode the second part of a segment in shared memory: the offset of each chunk.  SPEC 6.8."""
    return Struct(f"<{len(places)}Q").pack(*places)


def unpack_places(buffer: Buffer) -> tuple[int, ...]:
    """Decode the offsets of a segment's chunks.  Raises RemoteProtocolError if they are not u64."""
    number, rest = divmod(len(buffer), 8)
    if rest:
        raise RemoteProtocolError(f"the places of a segment have {len(buffer)} bytes, not n x 8")
    return Struct(f"<{number}Q").unpack(buffer)


def split_segment(body: Buffer) -> tuple[SegmentDescriptor, memoryview]:
    """Split a KV segment's payload that came as one buffer, without copying the KV.

    Raises:
        RemoteProtocolError: The buffer is too short for a descriptor.
    """
    view = memoryview(body)
    return SegmentDescriptor.unpack(view[: DESCRIPTOR.size]), view[DESCRIPTOR.size :]


def unasked_segments(
    frame: KvCache, payload: Sequence[Buffer], most_bytes: int
) -> list[tuple[Buffer, Buffer]]:
    """Return the (descriptor, KV) parts of the segments that came with an offer ("unasked").

    Raises:
        RemoteProtocolError: Their number differs from the header's, or they exceed `most_bytes`.
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
    """Split the KV to be sent into rectangles of at most `segment_bytes`.

    A rectangle has all layers of one or more whole blocks if they fit, else some layers of one
    block or token.  Rectangles are in the order in which prefill computes them.

    Args:
        block_size: Number of tokens in one of the sender's blocks.
        read_bytes: Size of rectangles that the receiver reads from shared memory; 0 for none.
        num_shards: Number of tensor-parallel ranks that share the heads of a layer.
        stages: For each group, the layers of each pipeline stage; None for a single stage.

    Raises:
        LocalProtocolError: One layer at one position does not fit into a segment, or more than
            `MAX_SEGMENTS` would be needed.
    """
    if cached_tokens == num_tokens:
        return []
    rectangles: list[Rectangle] = []
    for index, group in enumerate(layout.groups):
        tokens = group.sent(cached_tokens, num_tokens)
        if isinstance(group, KVGroup) and not tokens:
            continue  # a sliding window of one position: later tokens need no KV of earlier ones
        if segment_bytes < layer_bytes(group):
            raise LocalProtocolError(
                f"a segment of {segment_bytes} bytes is too small for one layer of one token or "
                f"state ({layer_bytes(group)} bytes)"
            )
        layers = [range(group.num_layers)] if stages is None else stages[index]
        cut = _cut(index, group, layers, tokens, segment_bytes, num_shards, block_size, read_bytes)
        rectangles += islice(cut, MAX_SEGMENTS + 1 - len(rectangles))
        if len(rectangles) > MAX_SEGMENTS:
            raise LocalProtocolError(
                f"more than {MAX_SEGMENTS} segments of {segment_bytes} bytes are too many"
            )
    return sorted(rectangles, key=lambda rectangle: rectangle.tokens.stop)


def _cut(
    index: int,
    group: Group,
    stages: Sequence[range],
    tokens: range,
    segment_bytes: int,
    num_shards: int,
    block_size: int,
    read_bytes: int,
) -> Iterator[Rectangle]:
    """Split the KV of one group into rectangles of at most `segment_bytes`.

    With `read_bytes`, the receiver reads whole blocks in the sender's memory, so many at once.
    """
    shares, longest = _shares(group.num_heads, num_shards), max(map(len, stages))
    piece_bytes = max(map(len, shares)) * group.head_bytes
    if not isinstance(group, KVGroup) or block_size * piece_bytes > segment_bytes:
        block_size, read_bytes = 1, 0  # no rectangle has whole blocks
    most_layers = segment_bytes // (block_size * piece_bytes)
    num_layers = -(-longest // -(-longest // most_layers))
    layers = [piece for stage in stages for piece in _pieces(stage, num_layers)]
    block_bytes = block_size * longest * piece_bytes
    joined_bytes = read_bytes or (segment_bytes if block_bytes < ALONE_BYTES else 0)
    step = max(1, joined_bytes // block_bytes) * block_size
    # Contiguous ranges of tokens, each split on its own, at multiples of the block size.
    for run in _whole_apart(tokens, block_size) if read_bytes else [tokens]:
        for piece in _pieces(run, step, run.start // block_size * block_size):
            for heads in shares:
                for own in layers:
                    yield Rectangle(index, own, heads, piece)


def _whole_apart(tokens: range, block_size: int) -> list[range]:
    """Split a token range at block boundaries into head, whole blocks and tail; omit empty ones.

    The receiver reads only whole blocks from shared memory.
    """
    #   tokens.start      first               end      tokens.stop
    #        |  of a block  |  whole blocks    |  of a block  |
    first = -(-tokens.start // block_size) * block_size
    end = tokens.stop // block_size * block_size
    if first > end:
        return [tokens]  # inside one block
    runs = [range(tokens.start, first), range(first, end), range(end, tokens.stop)]
    return [run for run in runs if run]


def _shares(num_heads: int, num_shards: int) -> list[range]:
    """Divide the heads among shards, at least one head each, so maybe among fewer shards."""
    num_shards = min(num_shards, num_heads)
    starts = [num_heads * shard // num_shards for shard in range(num_shards + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _pieces(whole: range, step: int, first: int | None = None) -> Iterator[range]:
    """Split a range every `step` from `first`, by default its start.

    An empty range, the position of a state, is one chunk.
    """
    first = whole.start if first is None else first
    cuts = range(first + step, whole.stop, step)
    return (range(a, b) for a, b in pairwise(chain((whole.start,), cuts, (whole.stop,))))


class Coverage:
    """The parts of a transfer that have been admitted, to reject overlapping segments."""

    def __init__(self, layout: KVLayout, cached_tokens: int, num_tokens: int) -> None:
        self.books = [Book(group, group.sent(cached_tokens, num_tokens)) for group in layout.groups]

    def admit(self, rectangle: Rectangle) -> None:
        """Add a rectangle.  Raises RemoteProtocolError if it is out of range or overlaps."""
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
        # (layers, heads) -> ascending, disjoint token ranges; adjacent ranges are merged.
        self.admitted: dict[tuple[range, range], list[tuple[int, int]]] = {}

    def admit(self, rectangle: Rectangle) -> None:
        """See `Coverage.admit`."""
        self._check(rectangle)
        _, layers, heads, tokens = rectangle
        ranges = self.admitted.get((layers, heads), [])
        start, end = tokens.start, tokens.stop + self._is_state  # a state counts as one token
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
