"""Segments: the rectangles of layers by tokens in which a KV cache travels.  SPEC 6.3.

The sender cuts what is to be sent with `plan`; the receiver trusts no plan: `Coverage` admits any
rectangles that lie inside the transfer and overlap nothing, as long as their layer ranges are the
same or apart.  So one list of token ranges per layer range says what has come, in whatever order;
adjacent ranges are merged, which keeps it short.
"""

from __future__ import annotations

from bisect import bisect_left
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.parts import Buffer
from wire.payloads import KVLayout

MIB: Final = 1 << 20
# Measured on loopback: 256 KiB messages lose a third of the bandwidth, 32 MiB more than half.
DEFAULT_SEGMENT_BYTES: Final = 2 * MIB
MAX_SEGMENT_BYTES: Final = 4 * MIB
# 64 GiB in segments of 1 MiB; bounds what a receiver remembers of one transfer.
MAX_SEGMENTS: Final = 65_536


class Rectangle(NamedTuple):
    """Layers [layer_start, layer_start + num_layers) by tokens [token_start, + num_tokens)."""

    layer_start: int
    num_layers: int
    token_start: int
    num_tokens: int

    @property
    def layer_end(self) -> int:
        return self.layer_start + self.num_layers

    @property
    def token_end(self) -> int:
        return self.token_start + self.num_tokens

    def num_bytes(self, layout: KVLayout) -> int:
        """KV bytes inside this rectangle."""
        return layout.token_bytes // layout.num_layers * self.num_layers * self.num_tokens


class SegmentDescriptor(NamedTuple):
    """First payload part of a KV segment: which rectangle, how many bytes, their digest.  SPEC 6.3.

    The bytes are ``[layer][k|v][kv_head][token][head_dim]``.  `digest` is XXH3-64 of them, seeded
    with the request id.  `idle_us` says for how long the sender had nothing to send before this
    segment: without it nobody could tell a slow link from a slow prompt.
    """

    layer_start: int
    num_layers: int
    token_start: int
    num_tokens: int
    num_bytes: int
    digest: int
    idle_us: int = 0

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(*self[:4])

    def pack(self) -> bytes:
        return DESCRIPTOR.pack(*self)

    @classmethod
    def unpack(cls, buffer: Buffer) -> SegmentDescriptor:
        """Read a descriptor.

        Raises:
            RemoteProtocolError: Not exactly `DESCRIPTOR.size` bytes.
        """
        if len(buffer) != DESCRIPTOR.size:
            raise RemoteProtocolError(
                f"the segment descriptor has {len(buffer)} bytes, not {DESCRIPTOR.size}"
            )
        return cls(*DESCRIPTOR.unpack(buffer))


DESCRIPTOR: Final = Struct("<IIIIQQQ")


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
    layout: KVLayout, first_token: int, num_tokens: int, segment_bytes: int
) -> list[Rectangle]:
    """Cut tokens [first_token, num_tokens) into rectangles of at most `segment_bytes`.

    Whole rows (all layers of some tokens) when one fits, else layer groups of single tokens; in
    the order in which prompt chunks are computed.

    Raises:
        LocalProtocolError: Not even one layer of one token fits, or it takes over `MAX_SEGMENTS`.
    """
    row_bytes = layout.token_bytes
    layer_bytes = row_bytes // layout.num_layers
    if segment_bytes < layer_bytes:
        raise LocalProtocolError(
            f"a segment of {segment_bytes} bytes is too small for one layer of one token "
            f"({layer_bytes} bytes)"
        )
    tokens = max(1, segment_bytes // row_bytes)
    layers = min(layout.num_layers, segment_bytes // layer_bytes)
    token_starts = range(first_token, num_tokens, tokens)
    layer_starts = range(0, layout.num_layers, layers)
    num_segments = len(token_starts) * len(layer_starts)
    if num_segments > MAX_SEGMENTS:
        raise LocalProtocolError(f"{num_segments} segments of {segment_bytes} bytes are too many")
    return [
        Rectangle(
            layer, min(layers, layout.num_layers - layer), token, min(tokens, num_tokens - token)
        )
        for token in token_starts
        for layer in layer_starts
    ]


class Coverage:
    """Which part of a transfer has been admitted; nothing is admitted twice."""

    def __init__(self, layout: KVLayout, first_token: int, num_tokens: int) -> None:
        self._layout = layout
        self._first_token = first_token
        self._num_tokens = num_tokens
        # Layer range -> its token ranges, which are ascending and apart; adjacent ones are merged.
        self.admitted: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def admit(self, rectangle: Rectangle) -> None:
        """Note a rectangle.

        Raises:
            RemoteProtocolError: It is empty, leaves the transfer, or overlaps an earlier one;
                nothing is noted then.
        """
        self._check(rectangle)
        layers = (rectangle.layer_start, rectangle.layer_end)
        ranges = self.admitted.get(layers, [])
        start, end = rectangle.token_start, rectangle.token_end
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
        self.admitted[layers] = ranges

    def _check(self, rectangle: Rectangle) -> None:
        if rectangle.num_layers == 0 or rectangle.num_tokens == 0:
            raise RemoteProtocolError(f"KV_CACHE: {rectangle} is empty")
        if (
            rectangle.layer_end > self._layout.num_layers
            or rectangle.token_start < self._first_token
            or rectangle.token_end > self._num_tokens
        ):
            raise RemoteProtocolError(
                f"KV_CACHE: {rectangle} leaves layers [0, {self._layout.num_layers}) or tokens "
                f"[{self._first_token}, {self._num_tokens})"
            )
        layers = (rectangle.layer_start, rectangle.layer_end)
        if layers not in self.admitted and any(
            start < rectangle.layer_end and rectangle.layer_start < end
            for start, end in self.admitted
        ):
            raise RemoteProtocolError(
                f"KV_CACHE: {rectangle} cuts the layers differently from earlier segments"
            )
