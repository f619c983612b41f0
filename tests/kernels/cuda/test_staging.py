"""The ways between pool and host: each gives the same bytes, and the faster one is taken.

The lane here is of the CPU: "device" and pinned memory are the host's, the kernel is the one of
csrc/kv.cu through the shim, and what computes is a list.  Streams themselves need a GPU.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import Rectangle, ShapeError, reference
from kernels.contract import segment_shape
from kernels.cuda import staging
from kernels.cuda.copy_streams import IN_FLIGHT
from kernels.cuda.staging import ALWAYS_PLAIN, SIZES, Staging, Table, Way, choose, measure
from tests.kernels.shim.backend import why_not
from tests.kernels.shim.lane import CpuLane

BF16 = torch.bfloat16
# The shim takes a second for a large segment.
SMALL_SIZES = (512, 2048)


@pytest.fixture
def lane() -> CpuLane:
    if reason := why_not():
        pytest.skip(reason)
    return CpuLane()


def pool() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 3, 2, 2, 8, 16, generator=generator).to(BF16)


TABLE, LAYERS, HEADS, TOKENS = [4, 0, 3, 1], range(3), range(1, 2), range(5, 29)
RECTANGLE = Rectangle(LAYERS, HEADS, TOKENS)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("buffer_bytes", [1, 32 << 20], ids=["layer by layer", "at once"])
def test_every_way_gives_the_same_bytes(lane: CpuLane, way: Way, buffer_bytes: int) -> None:
    lane.max_buffer_bytes = buffer_bytes
    held, filled = pool(), torch.zeros_like(pool())
    want = reference.pack_kv(held, TABLE, RECTANGLE, BF16)
    sent = staging.pack(way, lane, held, TABLE, RECTANGLE)
    assert torch.equal(sent, want) and not lane.num_working
    staging.unpack(way, lane, filled, TABLE, RECTANGLE, sent)
    assert torch.equal(reference.pack_kv(filled, TABLE, RECTANGLE, BF16), want)
    # Nothing around the rectangle was written.
    wanted = torch.zeros_like(held)
    reference.unpack_kv(wanted, TABLE, RECTANGLE, want)
    assert torch.equal(filled, wanted)
    num_parts = 3 if buffer_bytes == 1 else 1
    moves = {Way.PLAIN: 0, Way.DIRECT: 2, Way.STAGED: 2 * num_parts}[way]
    assert len(lane.moved) == moves
    assert len(lane.buffers) == (moves if way is Way.STAGED else 0)


def test_without_pinned_memory_a_copy_goes_plainly(lane: CpuLane) -> None:
    lane = CpuLane(num_pinned=0)
    held, filled = pool(), torch.zeros_like(pool())
    sent = staging.pack(Way.STAGED, lane, held, TABLE, RECTANGLE)
    staging.unpack(Way.DIRECT, lane, filled, TABLE, RECTANGLE, sent)
    assert torch.equal(reference.pack_kv(filled, TABLE, RECTANGLE, BF16), sent)
    assert lane.moved == []


@pytest.mark.parametrize(
    ("options", "says"),
    [({"obstacle": "cupy is not installed"}, "cupy"), ({"num_pinned": 0}, "ulimit -l")],
    ids=["no kernels", "no pinned memory"],
)
def test_what_keeps_the_ways_from_being_used_is_said(
    lane: CpuLane, options: dict[str, object], says: str
) -> None:
    it = Staging(pool(), CpuLane(**options), SMALL_SIZES)  # type: ignore[arg-type]
    assert says in it.why_plain
    assert it.packing == it.unpacking == ALWAYS_PLAIN
    assert torch.equal(
        it.pack(TABLE, RECTANGLE),
        Staging(pool(), lane, SMALL_SIZES).pack(TABLE, RECTANGLE),
    )


def test_a_staging_measures_and_serves(lane: CpuLane) -> None:
    held = pool()
    it = Staging(held, lane, SMALL_SIZES)
    assert it.why_plain == "" and [size for size, _ in it.packing] == list(SMALL_SIZES)
    assert torch.equal(held, pool())  # measured in memory of its own
    # About the sizes that the table names were moved.
    assert 0.7 * SMALL_SIZES[-1] < max(lane.moved) <= SMALL_SIZES[-1]
    filled = torch.zeros_like(held)
    sent = it.pack(TABLE, RECTANGLE)
    Staging(filled, lane, SMALL_SIZES).unpack(TABLE, RECTANGLE, sent)
    assert torch.equal(reference.pack_kv(filled, TABLE, RECTANGLE, BF16), sent)


@pytest.mark.parametrize("way", Way)
def test_a_copy_waits_for_the_step_that_was_marked_and_for_no_later_one(
    lane: CpuLane, way: Way
) -> None:
    held = torch.zeros_like(pool())
    lane.compute(lambda: held[:4].fill_(3))  # a step writes the blocks, late
    lane.mark()
    lane.compute(lambda: held[4:].fill_(5))  # the one under way writes others
    sent = staging.pack(way, lane, held, [3, 0, 2, 1], RECTANGLE)
    assert (sent == 3).all()
    assert len(lane.computing) == 1 and not held[4:].any()
    lane.mark()
    ones = torch.ones_like(sent)[..., :16, :]
    staging.unpack(way, lane, held, [4, 5], Rectangle(LAYERS, HEADS, range(16)), ones)
    assert not lane.computing and (held[4:, :, :, 1] == 1).all()  # the step did not overwrite it


def test_a_staging_marks_what_there_is_when_it_is_made(lane: CpuLane) -> None:
    held = torch.zeros_like(pool())
    lane.compute(lambda: held.fill_(3))
    it = Staging(held, lane, SMALL_SIZES)
    assert (it.pack(TABLE, RECTANGLE) == 3).all()
    lane.compute(lambda: held.fill_(4))
    assert (it.pack(TABLE, RECTANGLE) == 3).all()
    lane.mark()
    assert (it.pack(TABLE, RECTANGLE) == 4).all()


def test_a_block_table_is_uploaded_once_a_transfer(lane: CpuLane) -> None:
    held = pool()
    it = Staging(held, lane, SMALL_SIZES)
    it.packing = it.unpacking = ((1, Way.DIRECT),)
    mine, other = tuple(TABLE), tuple(TABLE)  # two transfers, of equal blocks
    lane.uploaded.clear()
    for tokens in (range(0, 8), range(8, 16), range(16, 32)):
        for table in (mine, other):
            segment = it.pack(table, Rectangle(LAYERS, HEADS, tokens))
            assert torch.equal(
                segment, reference.pack_kv(held, table, Rectangle(LAYERS, HEADS, tokens), BF16)
            )
            it.unpack(table, Rectangle(LAYERS, HEADS, tokens), segment)
    assert lane.uploaded == [mine, other]
    # One that can change is uploaded each time.
    changing = [4, 0]
    it.pack(changing, Rectangle(LAYERS, HEADS, range(16)))
    changing.reverse()
    want = reference.pack_kv(held, changing, Rectangle(LAYERS, HEADS, range(16)), BF16)
    assert torch.equal(it.pack(changing, Rectangle(LAYERS, HEADS, range(16))), want)


def test_a_table_is_not_taken_for_a_later_one_at_its_address(lane: CpuLane) -> None:
    tables, table = staging.Tables(lane), tuple(TABLE)
    num_references = sys.getrefcount(table)
    tables.on_device(table)
    lane.uploaded.clear()
    assert sys.getrefcount(table) > num_references, "so nothing else comes to lie there"


def test_tables_of_transfers_long_gone_are_dropped(lane: CpuLane) -> None:
    tables = staging.Tables(lane, max_tables=2)
    first, second, third = ((number, number + 1) for number in range(3))
    for table in (first, second, first, third, first, second):
        assert tables.on_device(table).tolist() == list(table)
    assert lane.uploaded == [first, second, third, second]


def test_copies_of_several_threads_run_at_a_time(lane: CpuLane) -> None:
    it, together = Staging(pool(), lane, SMALL_SIZES), Barrier(IN_FLIGHT)
    lane.on_working = lambda: together.wait(10)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        ranges = [range(5 + number, 29) for number in range(IN_FLIGHT)]
        sent = list(
            threads.map(lambda tokens: it.pack(TABLE, Rectangle(LAYERS, HEADS, tokens)), ranges)
        )
    for tokens, segment in zip(ranges, sent, strict=True):
        assert torch.equal(
            segment, reference.pack_kv(pool(), TABLE, Rectangle(LAYERS, HEADS, tokens), BF16)
        )


def test_a_wrong_rectangle_or_segment_is_refused(lane: CpuLane) -> None:
    it = Staging(pool(), lane, SMALL_SIZES)
    with pytest.raises(ShapeError, match="beyond"):
        it.pack(TABLE, Rectangle(LAYERS, HEADS, range(40)))
    with pytest.raises(ShapeError, match="segment"):
        it.unpack(TABLE, RECTANGLE, torch.zeros(3, 2, 1, 23, 16, dtype=BF16))


# What is decided.


def test_a_size_goes_the_way_of_the_nearest_one() -> None:
    table: Table = ((1 << 14, Way.DIRECT), (1 << 16, Way.PLAIN), (1 << 20, Way.STAGED))
    assert choose(table, 1) is choose(table, 0) is Way.DIRECT
    assert choose(table, 31 << 10) is Way.DIRECT and choose(table, 33 << 10) is Way.PLAIN
    assert choose(table, 255 << 10) is Way.PLAIN and choose(table, 257 << 10) is Way.STAGED
    assert choose(table, 1 << 40) is Way.STAGED


@given(
    latency_us=st.tuples(*[st.integers(1, 1000)] * 3),
    byte_us=st.tuples(*[st.floats(1e-6, 1e-2)] * 3),
)
def test_no_way_in_the_table_is_much_slower_than_another(
    latency_us: tuple[int, int, int], byte_us: tuple[float, float, float]
) -> None:
    now = 0.0
    calls: list[Way] = []

    def cost(way: Way, size: int) -> float:
        number = list(Way).index(way)
        return latency_us[number] + byte_us[number] * size

    def copy(way: Way, size: int) -> None:
        nonlocal now
        # The first of each is slow: it compiles.
        now += cost(way, size) * (1 if calls and calls[-1] is way else 50)
        calls.append(way)

    for size, way in measure(copy, SIZES, clock=lambda: now):
        assert cost(way, size) <= 1.1001 * min(cost(other, size) for other in Way)


@given(
    num_layers=st.integers(1, 80),
    num_kv_heads=st.integers(1, 32),
    head_dim=st.sampled_from([64, 128, 256]),
    num_bytes=st.sampled_from(SIZES),
)
def test_a_rectangle_has_about_the_bytes_asked_for(
    num_layers: int, num_kv_heads: int, head_dim: int, num_bytes: int
) -> None:
    it = torch.empty((1, num_layers, 2, num_kv_heads, 16, head_dim), dtype=BF16, device="meta")
    rectangle = staging.rectangle_of(num_bytes, it)
    layers, heads, _ = rectangle
    assert heads == range(num_kv_heads)
    got = math.prod(segment_shape(it, rectangle)) * 2
    assert layers.stop <= num_layers
    assert got <= max(num_bytes, 4 * num_kv_heads * head_dim)
    if got < num_bytes:
        assert 2 * got > num_bytes
