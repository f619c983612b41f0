"""KV goes from cache to cache by one copy, whatever their blocks; what differs is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda import staging
from tests.kernels.shim.driver import driver as driver
from tests.kernels.shim.lane import CpuLane
from tests.kv import whole
from wire.errors import RemoteProtocolError, TransferFailed
from wire.frames import KvCache
from wire.layout import KVLayout
from wire.parts import Buffer
from wire.payloads import Offer
from wire.transfer import (
    KVReceiver,
    Rectangle,
    Segment,
    SegmentDescriptor,
    pack_places,
    running_digest,
)
from worker.compute.contract import Memory
from worker.compute.kv_cache import TorchKVCache
from worker.compute.shared_memory import SharedMemory
from worker.executor.hash import MIXED
from worker.executor.host_kv_cache import HostKVCache
from worker.transfer.in_memory import fetch, find

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float16")
# Blocks of 4 tokens are whole blocks of the digest: a torch cache copies and digests in one pass.
WIDE = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=16, dtype="float16")
ID = 7 << 32 | 5
NUM_TOKENS = 24


def lent(ours: Any, theirs: Any) -> Any:
    """Return our memory as their cache maps it."""
    return theirs.map_memory(ours.memory.descriptor, ours.memory.about)


def device_cache(layout: KVLayout, block_size: int, num_blocks: int = 40) -> TorchKVCache:
    """A cache on a device that is a CPU (`tests.kernels.shim`)."""
    device, lane = torch.device("cpu"), CpuLane(dtype=torch.float16)
    return TorchKVCache(layout, num_blocks, block_size, device, make_lane=lambda _: lane)


def torch_cache(layout: KVLayout, block_size: int) -> TorchKVCache:
    cache = TorchKVCache(layout, 40, block_size, torch.device("cpu"))
    assert isinstance(cache.memory, SharedMemory)
    cache.memory.bytes[:] = np.random.default_rng(block_size).integers(0, 256, 1, np.uint8)
    return cache


def host_cache(layout: KVLayout, block_size: int) -> HostKVCache:
    return HostKVCache(layout, 40, block_size, num_states=4)


def receiver(layout: KVLayout, memory: Memory, num_tokens: int = NUM_TOKENS) -> KVReceiver:
    offer = Offer(
        layout=layout,
        num_tokens=num_tokens,
        total_bytes=layout.transfer_bytes(num_tokens),
        token_ids=bytes(4 * num_tokens),
        memory="baton-1",
    )
    limits: dict[str, Any] = {"max_bytes": 1 << 30, "credit_bytes": 1 << 30, "lease_s": 9.0}
    made = KVReceiver(ID, offer, layout=layout, now=0.0, **limits)
    made.accept(0, 0.0, len(memory))
    return made


def admitted(
    one: KVReceiver, rectangle: Rectangle, places: tuple[int, ...], digest: int
) -> Segment:
    size = rectangle.num_bytes(one.layout)
    descriptor = SegmentDescriptor.of(rectangle, size, digest, in_memory=1)
    segment = one.on_segment(KvCache(ID, 1, 2), (descriptor.pack(), pack_places(places)), 0.0)
    assert segment is not None and segment.places == places
    return segment


def table_of(block_size: int, seed: int) -> list[int]:
    blocks = np.random.default_rng(seed).permutation(40)
    return [int(block) for block in blocks[: NUM_TOKENS // block_size]]


@pytest.mark.parametrize("make", [torch_cache, host_cache])
@pytest.mark.parametrize("block_size", [4, 8, 2, 3])
@pytest.mark.parametrize("layout", [LAYOUT, WIDE])
def test_one_copy_brings_kv_from_cache_to_cache(
    make: Callable[[KVLayout, int], Any], block_size: int, layout: KVLayout
) -> None:
    ours, theirs = make(layout, 4), make(layout, block_size)
    tokens = whole(layout, 8, 16)
    table, other = table_of(4, 1), table_of(block_size, 2)
    kv = np.random.default_rng(0).integers(0, 256, tokens.num_bytes(layout), np.uint8).tobytes()
    ours.unpack(table, tokens, kv)
    assert ours.memory is not None
    found = find(ours, table, tokens, ID)
    assert found is not None and len(found[0]) == 4
    one = receiver(layout, ours.memory)
    fetch(theirs, other, one, admitted(one, tokens, *found), lent(ours, theirs))
    assert bytes(theirs.pack(other, tokens)) == kv


def test_what_fills_no_block_has_to_be_packed() -> None:
    cache = host_cache(MIXED, 4)
    table = table_of(4, 1)
    for tokens in (range(1, 4), range(4, 6), range(2, 10)):
        assert find(cache, table, whole(MIXED, tokens.start, len(tokens)), ID) is None
    some_heads = whole(MIXED, 0, 4)._replace(heads=range(1))
    assert find(cache, table, some_heads, ID) is None
    state = whole(MIXED, 4, 0, group=len(MIXED.groups) - 1)
    assert find(cache, table, state, ID) is None


def test_memory_that_changes_behind_the_copy_is_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = host_cache(WIDE, 4), host_cache(WIDE, 4)
    tokens, table = whole(WIDE, 0, 4), table_of(4, 1)
    kv, found = bytes(ours.pack(table, tokens)), find(ours, table, tokens, ID)
    assert found is not None and isinstance(ours.memory, SharedMemory)
    bytes_of, (place,) = ours.memory.bytes, found[0]

    class Late:
        """A digest before which the memory changes."""

        def __init__(self, request_id: int) -> None:
            self._digest = running_digest(request_id)
            self.intdigest = self._digest.intdigest

        def update(self, copied: Buffer) -> None:
            bytes_of[place] ^= 1
            self._digest.update(copied)

    monkeypatch.setattr("worker.compute.shared_memory.running_digest", Late)
    one = receiver(WIDE, ours.memory)
    segment = admitted(one, tokens, *found)
    fetch(theirs, table, one, segment, lent(ours, theirs))
    assert bytes(theirs.pack(table, tokens)) == kv != bytes(ours.pack(table, tokens))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging is measured with what the shim copies quickly."""
    monkeypatch.setattr(staging, "SIZES", (512, 2048))


@pytest.mark.usefixtures("driver", "quick")
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_one_kernel_brings_kv_from_device_to_device(block_size: int) -> None:
    ours, theirs = device_cache(WIDE, 8), device_cache(WIDE, block_size)
    tokens, table = whole(WIDE, 0, 16), table_of(8, 1)
    other = table_of(block_size, 2) if block_size == 8 else [7, 3]
    ours.pool.copy_(torch.randn(ours.pool.shape, generator=torch.Generator().manual_seed(1)))
    found = find(ours, table, tokens, ID)
    assert found is not None and len(found[0]) == 2 and ours.memory is not None
    one, memory = receiver(WIDE, ours.memory), lent(ours, theirs)
    fetch(theirs, other, one, admitted(one, tokens, *found), memory)
    assert theirs.pack(other, tokens) == ours.pack(table, tokens)
    # Bytes that have changed, as those of blocks that were given back, are noticed.
    ours.pool[table[1], 2, 1, 0, 3, 5] += 1
    again = receiver(WIDE, ours.memory)
    with pytest.raises(TransferFailed, match="digest"):
        fetch(theirs, other, again, admitted(again, tokens, *found), memory)
    assert find(ours, table, whole(WIDE, 0, 12), ID) is None


@pytest.mark.usefixtures("driver", "quick")
def test_a_device_reads_memory_of_the_host_and_no_place_between_its_units() -> None:
    ours, theirs = torch_cache(WIDE, 8), device_cache(WIDE, 8)
    tokens, table = whole(WIDE, 0, 16), table_of(8, 1)
    found = find(ours, table, tokens, ID)
    assert found is not None and ours.memory is not None
    one = receiver(WIDE, ours.memory)
    fetch(theirs, table, one, admitted(one, tokens, *found), lent(ours, theirs))
    assert theirs.pack(table, tokens) == ours.pack(table, tokens)
    assert theirs.memory is not None
    two = receiver(WIDE, theirs.memory)
    segment = admitted(two, tokens, (8, 0), 1)
    with pytest.raises(RemoteProtocolError, match="is 8, not a multiple of 16 bytes"):
        fetch(device_cache(WIDE, 8), table, two, segment, lent(theirs, theirs))
