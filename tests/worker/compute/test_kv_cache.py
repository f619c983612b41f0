"""KV leaves as bytes and comes back from any buffer, between caches of other block sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

import kernels
from kernels.cuda.lane import IN_FLIGHT
from kernels.cuda.staging import Staging
from tests.kernels.shim.backend import why_not
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32])
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
    assert bytes(receiver.pack([7, 0, 2, 5, 1], rectangle)) == bytes(sent)


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


def test_a_packed_segment_does_not_change_with_the_cache() -> None:
    sender = filled("bfloat16")
    sent = sender.pack([0, 1], part(LAYOUT, 0, 3, 0, 20))
    before = bytes(sent)
    sender.pool.zero_()
    assert bytes(sent) == before


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


def test_a_pool_that_the_host_cannot_read_goes_through_staging() -> None:
    if reason := why_not():
        pytest.skip(reason)
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16")
    plain = TorchKVCache(layout, 8, 16, torch.device("cpu"))
    plain.pool.copy_(torch.randn(plain.pool.shape, generator=torch.Generator().manual_seed(1)))
    lane = CpuLane()
    staged = TorchKVCache(
        layout,
        8,
        16,
        torch.device("cpu"),
        make_staging=lambda pool: Staging(pool, lane, (512, 2048)),
    )
    assert (plain.copies_at_once, staged.copies_at_once) == (1, IN_FLIGHT)
    assert (plain.copies_wait, staged.copies_wait) == (False, True)
    assert len(lane.moved) > 0  # it was measured when the cache was made
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
