"""What arrives lies where it belongs, and nothing stale is left beside it in its block."""

from __future__ import annotations

import pytest

from wire.transfer import plan
from worker.engine.unpacking import unpack
from worker.executor.hash import MIXED, WINDOW, HashKVCache

TABLE = [5, 2, 7, 0]


def stale(block_size: int) -> HashKVCache:
    cache = HashKVCache(8, block_size, MIXED, 4)
    cache.kv[:] = cache.window_kv[:] = 255
    return cache


@pytest.mark.parametrize("segment_bytes", [16 * 2, 1 << 20], ids=["token by token", "at once"])
def test_what_is_before_the_window_in_its_block_is_cleared(segment_bytes: int) -> None:
    cache, num_tokens = stale(8), 29
    for rectangle in plan(MIXED, 0, num_tokens, segment_bytes):
        unpack(cache, TABLE, rectangle, b"\7" * rectangle.num_bytes(MIXED), num_tokens)
    first = num_tokens - WINDOW + 1  # 17: the second token of the third block
    assert first % 8 == 1
    assert (cache.kv[[5, 2, 7], 0] == 7).all() and (cache.kv[0, 0, :, :, :5] == 7).all()
    windowed = cache.window_kv
    assert (windowed[[5, 2]] == 255).all(), "whole blocks are not looked at"
    assert (windowed[7, 0, :, :, :1] == 0).all() and (windowed[7, 0, :, :, 1:] == 7).all()
    for kv in (cache.kv, windowed):
        assert (kv[0, :, :, :, 5:] == 255).all() and (kv[[1, 3, 4, 6]] == 255).all()


def test_what_is_held_already_is_not_touched() -> None:
    cache, cached, num_tokens = stale(8), 24, 29
    for rectangle in plan(MIXED, cached, num_tokens, 1 << 20):
        unpack(cache, TABLE, rectangle, b"\7" * rectangle.num_bytes(MIXED), num_tokens)
    assert (cache.kv[[5, 2, 7]] == 255).all() and (cache.kv[0, :, :, :, :5] == 7).all()


def test_half_of_the_heads_clears_its_half() -> None:
    cache, num_tokens = stale(8), 29
    (upper,) = [it for it in plan(MIXED, 0, num_tokens, 1 << 20, 2) if it[0] == 1 and it[2][0]]
    unpack(cache, TABLE, upper, b"\7" * upper.num_bytes(MIXED), num_tokens)
    windowed = cache.window_kv
    assert (windowed[7, 0, :, 1, :1] == 0).all() and (windowed[7, 0, :, 0] == 255).all()


def test_of_layers_with_a_window_it_lies_beside_the_blocks() -> None:
    cache, num_tokens = HashKVCache(8, 8, MIXED, 4, num_window_blocks=2), 29
    cache.window_blocks.take(TABLE[2])
    cache.window_blocks.take(TABLE[3])
    cache.window_kv[:] = 255
    for rectangle in plan(MIXED, 0, num_tokens, 1 << 20):
        unpack(cache, TABLE, rectangle, b"\7" * rectangle.num_bytes(MIXED), num_tokens)
    of_first, of_second = cache.window_kv[:, 0]
    assert (of_first[:, :, :1] == 0).all() and (of_first[:, :, 1:] == 7).all()
    assert (of_second[:, :, :5] == 7).all() and (of_second[:, :, 5:] == 255).all()
    rectangle = plan(MIXED, 0, 12, 1 << 20)[1]
    with pytest.raises(ValueError, match="no KV in layers with a window"):
        unpack(cache, TABLE, rectangle, bytes(rectangle.num_bytes(MIXED)), 12)
