"""Copy KV between a device's pool and host memory, by the method that suits the size.

    plain   the kernel packs on the device, the driver copies that to pageable memory by itself
    direct  the kernel writes pinned memory, which it can address: one step, for small segments
    staged  the kernel packs into a buffer on the device, one DMA copies that to pinned memory

Unpacking uses the same methods backwards; the received segment is first copied into pinned memory.
At startup every method is timed at a few sizes, and each copy uses the method that was faster near
its own size.  Copies run on a lane (`copy_streams.py`) beside computation and are complete on
return; several threads may copy at a time, because every copy has its own buffers.  A copy waits
for the step after which it may touch its blocks, and for no later one: see `Lane.mark`.  Pools in
host memory do not need this module: `kernels.pack_kv` reads them directly.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from statistics import median
from threading import Lock

import torch

import kernels
from kernels import contract
from kernels.contract import KernelError, Rectangle, segment_shape
from kernels.cuda import launch
from kernels.cuda.copy_streams import Lane

KIB = 1 << 10
# Up to the largest segment of the wire; a copy of another size uses the method of the nearest.
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
# A DMA takes no multiprocessor from a step, so it is chosen if it takes up to this times the best
# time.
DMA_PATIENCE = 1.1
REPEATS = 5
# Block tables that are cached on the device: as many as transfers that run at a time.
MAX_TABLES = 256


class Way(Enum):
    """A method of copying KV between a pool and the host."""

    PLAIN = "plain"
    DIRECT = "direct"
    STAGED = "staged"


# The method for each measured size in bytes, ascending.
Table = tuple[tuple[int, Way], ...]
ALWAYS_PLAIN: Table = ((1, Way.PLAIN),)


class Staging:
    """Packs and unpacks one pool; create it before requests are served, because it measures.

    Attributes:
        packing: the method by size, out of the pool.
        unpacking: the method by size, into it.
        why_plain: why only the plain method is used; empty if all are.
    """

    def __init__(self, pool: torch.Tensor, lane: Lane, sizes: Sequence[int] = ()) -> None:
        """Measure at `sizes`, by default `SIZES`."""
        sizes = sizes or SIZES
        self._pool = pool
        self._lane = lane
        self._tables = Tables(lane)
        self.packing = self.unpacking = ALWAYS_PLAIN
        self.why_plain = _obstacle(pool, lane, sizes[-1])
        if not self.why_plain:
            self.packing, self.unpacking = _measured(pool, lane, sizes)

    def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> torch.Tensor:
        """Copy a rectangle of one sequence's KV to the host, in the order of the wire.

        Returns:
            [l, 2, h, t, D] of the pool's dtype in host memory that is not written to later.

        Raises:
            ShapeError: The rectangle is empty, outside the pool, or beyond the block table.
        """
        contract.check_rectangle(self._pool, block_table, rectangle)
        num_bytes = math.prod(segment_shape(self._pool, rectangle)) * self._pool.itemsize
        way = choose(self.packing, num_bytes)
        return pack(way, self._lane, self._pool, block_table, rectangle, self._tables)

    def unpack(
        self, block_table: Sequence[int], rectangle: Rectangle, segment: torch.Tensor
    ) -> None:
        """Copy a segment, [l, 2, h, t, D] of the pool's dtype on the host, into blocks.

        Raises:
            ShapeError: The rectangle is not within the pool, or the segment does not fit it.
        """
        contract.check_rectangle(self._pool, block_table, rectangle)
        contract.check_segment(self._pool, rectangle, segment)
        way = choose(self.unpacking, segment.nbytes)
        unpack(way, self._lane, self._pool, block_table, rectangle, segment, self._tables)


class Tables:
    """A cache of block tables on the device: all segments of a transfer have the same tuple."""

    def __init__(self, lane: Lane, max_tables: int = MAX_TABLES) -> None:
        self._lane = lane
        self._max_tables = max_tables
        self._lock = Lock()
        # By id, because comparing the contents would take as long as uploading them.
        self._held: OrderedDict[int, tuple[Sequence[int], torch.Tensor]] = OrderedDict()

    def on_device(self, block_table: Sequence[int]) -> torch.Tensor:
        with self._lock:
            found = self._held.get(id(block_table))
            if found is None:
                found = block_table, self._lane.upload(block_table)
                if isinstance(block_table, tuple):  # anything else may change
                    self._held[id(block_table)] = found  # the entry keeps the id from being reused
            else:
                self._held.move_to_end(id(block_table))
            if len(self._held) > self._max_tables:
                self._held.popitem(last=False)
            return found[1]


def pack(
    way: Way,
    lane: Lane,
    pool: torch.Tensor,
    block_table: Sequence[int],
    rectangle: Rectangle,
    tables: Tables | None = None,
) -> torch.Tensor:
    """Copy a rectangle to the host by this method; by the plain one if no pinned memory is left."""
    with lane.working():
        segment = None
        if way is not Way.PLAIN:
            segment = _pinned(lane, segment_shape(pool, rectangle), pool.dtype)
        if segment is None:
            return kernels.pack_kv(pool, block_table, rectangle).cpu()
        table = (tables or Tables(lane)).on_device(block_table)
        if way is Way.DIRECT:
            lane.start(launch.move(pool, table, rectangle, segment, into_pool=False))
            return segment
        for part, mine in _groups(lane, pool, rectangle):
            buffer = lane.buffer(segment[mine].shape, pool.dtype)
            lane.start(launch.move(pool, table, part, buffer, into_pool=False))
            segment[mine].copy_(buffer, non_blocking=True)
        return segment


def unpack(
    way: Way,
    lane: Lane,
    pool: torch.Tensor,
    block_table: Sequence[int],
    rectangle: Rectangle,
    segment: torch.Tensor,
    tables: Tables | None = None,
) -> None:
    """Copy a host segment into blocks; by the plain method if no pinned memory is left."""
    with lane.working():
        pinned = None
        if way is not Way.PLAIN:
            pinned = _pinned(lane, segment.shape, pool.dtype)
        if pinned is None:
            kernels.unpack_kv(pool, block_table, rectangle, segment)
            return
        pinned.copy_(segment)
        table = (tables or Tables(lane)).on_device(block_table)
        if way is Way.DIRECT:
            lane.start(launch.move(pool, table, rectangle, pinned, into_pool=True))
            return
        for part, mine in _groups(lane, pool, rectangle):
            buffer = lane.buffer(pinned[mine].shape, pool.dtype)
            buffer.copy_(pinned[mine], non_blocking=True)
            lane.start(launch.move(pool, table, part, buffer, into_pool=True))


def choose(table: Table, num_bytes: int) -> Way:
    """Return the method of the measured size that is nearest by ratio."""
    return min(table, key=lambda entry: abs(math.log(entry[0] / max(1, num_bytes))))[1]


def fastest(seconds: Mapping[Way, float]) -> Way:
    """Return the fastest method, or staged if that is not much slower; see DMA_PATIENCE."""
    best = min(seconds, key=lambda way: seconds[way])
    if seconds.get(Way.STAGED, math.inf) <= DMA_PATIENCE * seconds[best]:
        return Way.STAGED
    return best


def measure(
    copy: Callable[[Way, int], object],
    sizes: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> Table:
    """Time `copy(way, bytes)`, which returns when it is complete, for every method and size."""

    def timed(way: Way, size: int) -> float:
        copy(way, size)  # compiles, and fills the allocators
        durations = []
        for _ in range(REPEATS):
            start_s = clock()
            copy(way, size)
            durations.append(clock() - start_s)
        return median(durations)

    return tuple((size, fastest({way: timed(way, size) for way in Way})) for size in sizes)


def rectangle_of(num_bytes: int, pool: torch.Tensor) -> Rectangle:
    """Choose a rectangle of about `num_bytes`; all layers if one token's fit."""
    layer_bytes = 2 * pool.shape[3] * pool.shape[5] * pool.itemsize
    num_layers = min(pool.shape[1], max(1, num_bytes // layer_bytes))
    tokens = range(max(1, num_bytes // (num_layers * layer_bytes)))
    return Rectangle(range(num_layers), range(pool.shape[3]), tokens)


def _obstacle(pool: torch.Tensor, lane: Lane, num_bytes: int) -> str:
    try:
        lane.require(pool)
    except KernelError as error:
        return str(error)
    if _pinned(lane, (num_bytes,), torch.uint8) is None:
        return "no pinned host memory is to be had; see ulimit -l"
    return ""


def _measured(pool: torch.Tensor, lane: Lane, sizes: Sequence[int]) -> tuple[Table, Table]:
    # Not in the pool itself: it may be small, and a measurement writes to it.
    tokens = rectangle_of(sizes[-1], pool).tokens
    scratch = pool.new_zeros((-(-len(tokens) // pool.shape[4]), *pool.shape[1:]))
    lane.mark()
    blocks = range(len(scratch))
    received = torch.zeros(sizes[-1] + scratch[0].nbytes, dtype=torch.uint8)

    def out(way: Way, size: int) -> None:
        pack(way, lane, scratch, blocks, rectangle_of(size, scratch))

    def back(way: Way, size: int) -> None:
        rectangle = rectangle_of(size, scratch)
        shape = segment_shape(scratch, rectangle)
        segment = received[: math.prod(shape) * scratch.itemsize].view(scratch.dtype).view(shape)
        unpack(way, lane, scratch, blocks, rectangle, segment)

    return measure(out, sizes), measure(back, sizes)


def _pinned(lane: Lane, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    try:
        return lane.pinned(shape, dtype)
    except RuntimeError:  # raised by torch if the driver refuses
        return None


def _groups(
    lane: Lane, pool: torch.Tensor, rectangle: Rectangle
) -> Iterator[tuple[Rectangle, slice]]:
    """Yield (part of the rectangle, layers of the segment) in groups that fit a buffer."""
    layers = rectangle.layers
    one = rectangle._replace(layers=range(1))
    step = max(1, lane.max_buffer_bytes // (math.prod(segment_shape(pool, one)) * pool.itemsize))
    for first in range(0, len(layers), step):
        part = rectangle._replace(layers=layers[first : first + step])
        yield part, slice(first, first + step)
