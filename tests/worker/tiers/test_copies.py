"""A block that was copied out and in again is the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wire.layout import KVGroup, KVLayout
from worker.compute.contract import KVCache
from worker.compute.kv_cache import TorchKVCache
from worker.executor.host_kv_cache import HostKVCache
from worker.tiers.copies import BlockCopies, Rate

GROUP = KVGroup(num_layers=2, num_kv_heads=3, key_dim=4, value_dim=4, dtype="float32")
LAYOUT = KVLayout(groups=(GROUP, GROUP))


@pytest.mark.parametrize("kind", ["host", "torch"])
def test_a_block_comes_back_as_it_was(kind: str) -> None:
    cache: KVCache
    if kind == "host":
        cache = HostKVCache(LAYOUT, 4, 5)
        content = cache.items.view(np.uint8)
    else:
        cache = TorchKVCache(LAYOUT, 4, 5, torch.device("cpu"))
        content = cache.pool.view(torch.uint8).numpy()
    content[:] = np.random.default_rng(1).integers(0, 256, content.shape, np.uint8)
    before = content.copy()
    copies = BlockCopies(cache)
    kv = copies.copy_out(2)
    assert len(kv) == copies.num_bytes == 5 * LAYOUT.token_bytes
    content[2] = 0
    copies.copy_in(1, kv)
    assert (content[1] == before[2]).all() and not content[2].any()
    assert (content[[0, 3]] == before[[0, 3]]).all()


def test_a_rate_is_measured_and_doubted() -> None:
    rate = Rate()
    assert rate.seconds(100) == 0.0
    rate.observe(100, 2.0)
    assert rate.seconds(50) == 1.0
    rate.observe(0, 0.0)
    assert rate.seconds(50) == 1.0
    for _ in range(20):
        rate.doubt()
    assert rate.seconds(50) < 0.5
    rate.observe(10, 100.0)
    assert rate.seconds(1) > 5, "a long measurement outweighs the earlier ones"
