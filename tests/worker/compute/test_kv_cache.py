"""KV leaves as bytes and comes back from any buffer, between caches of other block sizes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import structlog
import torch
from msgspec import structs

import kernels
from kernels.cuda import staging
from kernels.cuda.copy_streams import IN_FLIGHT
from tests.kernels.shim.backend import why_not
from tests.kernels.shim.driver import driver as driver
from tests.kernels.shim.lane import CpuLane
from tests.kv import part
from wire.layout import KVGroup, KVLayout, StateGroup
from wire.transfer import Rectangle, plan
from worker.compute.kv_cache import TorchKVCache

DTYPES = ("float32", "bfloat16", "float16")
LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=6, dtype="float32")


def cache(dtype: str = "float32", block_size: int = 16, num_blocks: int = 8) -> TorchKVCache:
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=6, dtype=dtype)
    return TorchKVCache(layout, num_blocks, block_size, torch.device("cpu"))


def filled(dtype: str, block_size: int = 16) -> TorchKVCache:
    result = cache(dtype, block_size)
    result.pool.copy_(torch.randn(result.pool.shape, generator=torch.Generator().manual_seed(1)))
    return result


@pytest.mark.parametrize(("dtype", "block_size"), [*zip(DTYPES, [8, 16, 32], strict=True)])
@pytest.mark.parametrize(
    "rectangle", [part(LAYOUT, 0, 3, 0, 40), part(LAYOUT, 1, 2, 7, 26), part(LAYOUT, 2, 1, 39, 1)]
)
def test_bytes_round_trip_between_block_sizes(
    dtype: str, block_size: int, rectangle: Rectangle
) -> None:
    sender, receiver = filled(dtype), cache(dtype, block_size)
    sent = sender.pack([6, 1, 3], rectangle)
    num_tokens_bytes = sender.layout.token_bytes // 3 * len(rectangle.layers)
    assert sent.nbytes == len(sent) == len(rectangle.tokens) * num_tokens_bytes
    receiver.unpack([7, 0, 2, 5, 1], rectangle, sent)
    before = bytes(sent)
    sender.pool.zero_()
    assert bytes(receiver.pack([7, 0, 2, 5, 1], rectangle)) == bytes(sent) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", [(0, 3), (1, 2)])
def test_a_whole_block_is_seen_where_it_lies(dtype: str, layers: tuple[int, int]) -> None:
    sender, receiver = filled(dtype), cache(dtype)
    rectangle = part(LAYOUT, *layers, 16, 16)
    seen = sender.view([6, 1, 3], rectangle)
    assert seen == sender.pack([6, 1, 3], rectangle)
    receiver.unpack([2, 5], rectangle, bytes(seen))
    assert receiver.view([2, 5], rectangle) == seen
    with pytest.raises(ValueError):
        receiver.unpack([2, 5], rectangle, bytes(seen)[:-1])
    sender.pool.zero_()
    assert not any(seen)


@pytest.mark.parametrize(
    "rectangle",
    [
        part(LAYOUT, 0, 3, 0, 15),
        part(LAYOUT, 0, 3, 8, 16),
        part(LAYOUT, 0, 3, 0, 32),
        part(LAYOUT, 0, 3, 0, 16)._replace(heads=range(1)),
    ],
)
def test_what_does_not_lie_in_one_piece_is_not_seen(rectangle: Rectangle) -> None:
    assert filled("float32").view([6, 1, 3], rectangle) is None


def test_the_bytes_are_in_the_wires_order() -> None:
    sender = filled("float32")
    sent = np.frombuffer(sender.pack([6, 1, 3], part(LAYOUT, 1, 2, 10, 12)), np.float32)
    segment = sent.reshape(2, 2, 2, 12, 6)
    for token in (0, 5, 6, 11):
        block = [6, 1, 3][(10 + token) // 16]
        pool = sender.pool[block, 1:3, :, :, (10 + token) % 16].numpy()
        assert (segment[:, :, :, token] == pool).all()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_unpacks_from_any_buffer_aligned_or_not(kind: type) -> None:
    sender, receiver = filled("float32"), cache()
    rectangle = part(LAYOUT, 0, 3, 0, 20)
    sent = bytes(sender.pack([0, 1], rectangle))
    for offset in (0, 1):
        shifted = memoryview(kind(b"\0" * offset + sent))[offset:]
        receiver.unpack([2, 3], rectangle, kind(sent) if offset == 0 else shifted)
        assert bytes(receiver.pack([2, 3], rectangle)) == sent


@pytest.mark.parametrize("size", [0, 1, 3 * 2 * 2 * 6 * 4 * 20 - 4, 3 * 2 * 2 * 6 * 4 * 20 + 4])
def test_a_segment_of_another_size_is_refused(size: int) -> None:
    receiver = cache()
    with pytest.raises(ValueError, match="bytes"):
        receiver.unpack([0, 1], part(LAYOUT, 0, 3, 0, 20), b"\1" * size)
    assert not receiver.pool.any()


def test_a_rectangle_beyond_the_table_is_refused() -> None:
    receiver = cache()
    segment = b"\0" * (receiver.layout.token_bytes * 17)
    with pytest.raises(kernels.ShapeError, match="beyond"):
        receiver.unpack([0], part(LAYOUT, 0, 3, 0, 17), segment)
    with pytest.raises(kernels.ShapeError, match="layers"):
        receiver.pack([0], part(LAYOUT, 2, 2, 0, 1))


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> CpuLane:
    """The lane of a device that is a CPU; it is measured with what the shim copies quickly."""
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setattr(staging, "SIZES", (512, 2048))
    return CpuLane()


def on_device(lane: CpuLane, layout: KVLayout, **room: int) -> TorchKVCache:
    return TorchKVCache(layout, 8, 16, torch.device("cpu"), make_lane=lambda _: lane, **room)


WIDE = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16")


def test_a_pool_that_the_host_cannot_read_goes_through_staging(lane: CpuLane) -> None:
    plain = TorchKVCache(WIDE, 8, 16, torch.device("cpu"))
    plain.pool.copy_(torch.randn(plain.pool.shape, generator=torch.Generator().manual_seed(1)))
    staged = on_device(lane, WIDE)
    assert (plain.copies_at_once, staged.copies_at_once) == (1, IN_FLIGHT)
    assert (plain.copies_wait, staged.copies_wait) == (False, True)
    assert len(lane.moved) > 0  # it was measured when the cache was made
    assert staged.view([6, 1, 3], part(WIDE, 0, 3, 0, 16)) is None
    rectangle = part(LAYOUT, 1, 2, 7, 26)
    for heads in (range(1, 2), range(2)):
        some = rectangle._replace(heads=heads)
        sent = plain.pack([6, 1, 3], some)
        staged.unpack([2, 7, 0], some, sent)
        assert staged.pack([2, 7, 0], some) == sent
    with pytest.raises(ValueError, match="bytes"):
        staged.unpack([2, 7, 0], rectangle, bytes(sent)[:-1])


@pytest.mark.parametrize("block_size", [8, 16])
def test_groups_and_halves_of_the_heads_cross_by_themselves(block_size: int) -> None:
    """As from two shards of one sender: together they are what one without shards sends."""
    full = KVGroup(num_layers=2, num_kv_heads=4, key_dim=6, value_dim=6, dtype="float32")
    layout = KVLayout(groups=(full, structs.replace(full, num_layers=3, window=9)))
    sender = TorchKVCache(layout, 4, 16, torch.device("cpu"))
    for pool in sender.pools:
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(1)))
    receiver = TorchKVCache(layout, 8, block_size, torch.device("cpu"))
    ours, theirs = [2, 0, 3], [7, 1, 5, 2, 0]
    for rectangle in plan(layout, 0, 40, 1 << 20, num_shards=2):
        receiver.unpack(theirs, rectangle, bytes(sender.pack(ours, rectangle)))
    for rectangle in plan(layout, 0, 40, 1 << 20):
        assert receiver.pack(theirs, rectangle) == sender.pack(ours, rectangle)
    written = sum(int((pool != 0).sum()) for pool in receiver.pools)
    assert written == (2 * 40 + 3 * 8) * 2 * 4 * 6, "of layers with a window, what it reaches"
    fewer = TorchKVCache(
        *(layout, 8, block_size, torch.device("cpu")), num_window_blocks=3, spare_blocks=1
    )
    assert [pool.shape[:2] for pool in fewer.pools] == [(9, 2), (4, 3)]


def test_states_cross_whole_or_in_halves_of_their_heads() -> None:
    state = StateGroup(num_layers=3, num_heads=4, head_bytes=20)
    layout = KVLayout(groups=(*LAYOUT.groups, state))
    sender, receiver = (
        TorchKVCache(layout, 4, size, torch.device("cpu"), num_states=5) for size in (16, 8)
    )
    assert sender.states is not None and sender.states.shape == (5, 3, 4, 5)
    ours, theirs = [2, 0, 3], [3, 1, 2, 0]
    sender.states.copy_(torch.arange(300.0).view(5, 3, 4, 5))
    slot = sender.state_slots.take(ours, 20)
    halves = [it for it in plan(layout, 0, 20, 1 << 20, num_shards=2) if it.group == 1]
    assert len(halves) == 2
    for rectangle in halves:
        segment = bytes(sender.pack(ours, rectangle))
        receiver.unpack(theirs, rectangle, memoryview(b"." + segment)[1:])  # at an odd address
    assert receiver.states is not None
    found = receiver.states[receiver.state_slots.find(theirs, 20)]
    assert torch.equal(found, sender.states[slot])
    (whole,) = (it for it in plan(layout, 0, 20, 1 << 20) if it.group == 1)
    packed = receiver.pack(theirs, whole)
    assert packed == sender.pack(ours, whole) == sender.states[slot].numpy().tobytes()
    found += 1
    assert packed == sender.states[slot].numpy().tobytes(), "it is nobody else's memory"
    with pytest.raises(ValueError, match="the segment has 239 bytes, its rectangle 240"):
        receiver.unpack(theirs, whole, packed[:-1])
    with pytest.raises(ValueError, match="no state after 19 tokens"):
        receiver.pack(theirs, whole._replace(tokens=range(19, 19)))


# Memory that other processes can map.


def test_blocks_on_a_device_lie_in_memory_that_others_can_map(
    driver: ctypes.CDLL, lane: CpuLane
) -> None:
    windows = KVLayout(groups=(*WIDE.groups, structs.replace(WIDE.kv_groups[0], window=20)))
    staged = on_device(lane, windows, num_window_blocks=5, spare_blocks=1)
    assert staged.memory is not None and staged.memory.kind == "cuda"
    for index, pool in enumerate(staged.pools):
        assert not pool.any()
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(index)))
    descriptor, about = staged.memory.descriptor, staged.memory.about
    theirs = on_device(lane, WIDE).map_memory(descriptor, about)
    for group in (0, 1):
        block = part(windows, 1, 2, 16, 16)._replace(group=group)
        place, kv = staged.place([4, 2, 3], block), staged.pack([4, 2, 3], block)
        assert place is not None
        room = theirs.room(len(kv))
        digest = theirs.copy([place], len(kv), room, [0], 7)
        assert room.bytes.tobytes() == bytes(kv)
        assert digest == staged.memory.digest([place], len(kv), 7)
    assert staged.place([4, 2, 3], block._replace(tokens=range(16, 31))) is None
    assert staged.place([4, -1, 3], block) is None


def test_a_device_without_such_memory_keeps_its_kv_to_itself(
    driver: ctypes.CDLL, lane: CpuLane
) -> None:
    driver.shim_refuse(b"cuMemCreate")
    with structlog.testing.capture_logs() as logs:
        staged = on_device(lane, WIDE)
    assert staged.memory is None and not staged.pool.any()
    assert "cuMemCreate: not here" in logs[0]["reason"]
    assert staged.place([4], part(WIDE, 0, 3, 0, 16)) is None


def test_a_device_whose_kernels_cannot_run_lends_and_maps_nothing(
    driver: ctypes.CDLL, lane: CpuLane
) -> None:
    staged = on_device(CpuLane(obstacle="cupy is not installed"), WIDE)
    assert staged.memory is None
    staged.pool.fill_(3)  # which it is still made of
    lent, live = on_device(lane, WIDE).memory, driver.shim_live()
    assert lent is not None
    with pytest.raises(OSError, match="cupy is not installed"):
        staged.map_memory(lent.descriptor, lent.about)
    assert driver.shim_live() == live


def test_memory_of_a_device_is_mapped_on_a_device_only(driver: ctypes.CDLL, lane: CpuLane) -> None:
    lent = on_device(lane, WIDE).memory
    assert lent is not None
    with pytest.raises(OSError, match="lies on a GPU"):
        filled("bfloat16").map_memory(lent.descriptor, lent.about)
    driver.shim_refuse(b"cuMemSetAccess")  # another GPU, that ours cannot read
    live = driver.shim_live()
    with pytest.raises(OSError, match="cuMemSetAccess"):
        on_device(lane, WIDE).map_memory(lent.descriptor, lent.about)
    assert driver.shim_live() == live


# What is computed when.


def test_a_state_is_copied_after_the_step_that_was_marked_and_during_the_next(
    lane: CpuLane,
) -> None:
    layout = KVLayout(groups=(*WIDE.groups, StateGroup(num_layers=1, num_heads=2, head_bytes=64)))
    staged = on_device(lane, layout, num_states=4)
    assert staged.states is not None
    states, slot = staged.states, staged.state_slots.take([5], 16)
    state = Rectangle(1, range(1), range(2), range(16, 16))
    lane.compute(lambda: states.fill_(3))
    staged.mark()
    lane.compute(lambda: states.fill_(5))  # a long step
    assert (np.frombuffer(staged.pack([5], state), np.float32) == 3).all()
    assert len(lane.computing) == 1, "the copy waited for a step that was asked for later"
    staged.mark()
    staged.unpack([5], state, np.full(32, 7, np.float32).tobytes())
    assert not lane.computing and (states[slot] == 7).all()
