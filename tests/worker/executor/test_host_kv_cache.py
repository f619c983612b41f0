"""Rows in and out of host blocks; packing for the wire is `test_contract`'s, on the same class."""

import numpy as np
import pytest

from tests.kv import whole
from wire.layout import KVLayout
from worker.executor.host_kv_cache import HostKVCache

LAYOUTS = [
    KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8"),
    KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=5, dtype="float32"),
    KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16"),
]


def slots_of(table: list[int], block_size: int, num_tokens: int) -> np.ndarray:
    positions = np.arange(num_tokens)
    return np.array(table)[positions // block_size] * block_size + positions % block_size


def filled(layout: KVLayout, table: list[int], num_tokens: int) -> tuple[HostKVCache, np.ndarray]:
    cache = HostKVCache(layout, 6, 4)
    rows = np.random.default_rng(1).integers(0, 256, (num_tokens, layout.token_bytes), np.uint8)
    cache.write(slots_of(table, 4, num_tokens).astype(np.int32), rows)
    return cache, rows


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_come_back_as_they_were_written(layout: KVLayout) -> None:
    cache, rows = filled(layout, [5, 0, 3], 11)
    assert np.array_equal(cache.rows([5, 0, 3], 11), rows)
    assert np.array_equal(cache.rows(np.array([5, 0, 3, 0, 0]), 6), rows[:6])
    assert cache.rows([5, 0, 3], 0).shape == (0, layout.token_bytes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_row_is_layer_then_k_or_v_then_head(layout: KVLayout) -> None:
    cache, rows = filled(layout, [5, 0, 3], 11)
    packed = cache.pack([5, 0, 3], whole(layout, 0, 11))
    wire = np.frombuffer(packed, np.uint8)
    wire = wire.reshape(layout.kv_groups[0].num_layers, 2, layout.kv_groups[0].num_kv_heads, 11, -1)
    assert np.array_equal(np.moveaxis(wire, 3, 0).reshape(11, -1), rows)


def test_writing_touches_its_slots_only() -> None:
    cache, rows = filled(LAYOUTS[1], [5, 0, 3], 11)
    cache.write(np.array([1], np.int32), np.zeros_like(rows[:1]))  # block 0, the sixth token
    changed = (cache.rows([5, 0, 3], 11) != rows).any(axis=1)
    assert changed.nonzero()[0].tolist() == [5]
