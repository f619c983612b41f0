"""A tile of attention: scores of 64 keys, their values weighted, both where they lie in the pool.

Few rows meet keys as they lie; many rows (prompts) are worth turning keys into panels, and scores
are matrix products as well.  16-bit keys and values are widened in registers: every sum is float32.
`words` are those of `kernels.cpu.attention.attend`; a table maps a sequence's blocks to the pool's.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.intrinsics import brain_at, fetch, floats_at, half_at, ints_at
from kernels.cpu.simd import PANEL, key_dots, panel_product
from kernels.cpu.threads import inner

# Keys of a tile, and floats from a row of scores to the next: up to three beyond are written too.
TILE = 64
SCORES = TILE + 4
_LINE_BYTES = 64
# From so many rows on, turning keys into panels is cheaper than a sum across lanes for each score.
_MANY = 12
# Rows that meet one panel in registers; rows that meet four keys, or two panels of values.
_GROUP, _FEW, _KEYS = 6, 3, 4

_product = panel_product(_GROUP)
_product_of_two = panel_product(_FEW, 2)
_dots = key_dots(_FEW)


@inner
def score(words, table, head, first, num_keys, end, rows, x, scores, panels):  # type: ignore[no-untyped-def]
    """Write the scores [rows, SCORES] of the keys from `first` on, of a context that ends at `end`.

    `panels` is room for the tile's keys as float32.
    """
    element, head_dim = words[2], words[10]
    stride, row_bytes = head_dim * 4, head_dim * (4 if element == 0 else 2)
    key = 0
    while key < num_keys:
        keys, length = _run(words, table, 0, head, first + key, end)
        length = min(length, num_keys - key)
        if rows < _MANY:
            for j in range(0, length, _KEYS):
                at, to = keys + j * row_bytes, scores + (key + j) * 4
                _score_few(element, at, row_bytes, length - j, rows, x, stride, to)
        else:
            for j in range(key, key + length):
                column = panels + j // PANEL * PANEL * stride + j % PANEL * 4
                _turn(element, keys + (j - key) * row_bytes, column, head_dim)
        key += length
    if rows >= _MANY:
        _score_many(panels, num_keys, rows, x, stride, scores)


@inner
def _run(words, table, kind, head, position, end):  # type: ignore[no-untyped-def]
    """Return where the key (kind 0) or value (1) of a position lies, and how many lie in a row.

    Those of a tile later are asked for: blocks lie anywhere, so no processor foresees the next.
    """
    num_kv_heads, head_dim, num_layers, block_size = words[9], words[10], words[12], words[13]
    row_bytes = head_dim * (4 if words[2] == 0 else 2)
    head_bytes = block_size * row_bytes
    block_bytes = num_layers * 2 * num_kv_heads * head_bytes
    start = words[11] + (kind * num_kv_heads + head) * head_bytes
    blocks = ints_at(table)
    index, offset = position // block_size, position % block_size
    length = min(block_size - offset, end - position)
    if position + TILE < end:
        later = position + TILE
        at = start + np.int64(blocks[later // block_size]) * block_bytes
        at += later % block_size * row_bytes
        for line in range(0, length * row_bytes, _LINE_BYTES):
            fetch(at + line)
    return start + np.int64(blocks[index]) * block_bytes + offset * row_bytes, length


@inner
def _score_few(element, keys, row_bytes, num_keys, rows, x, stride, scores):  # type: ignore[no-untyped-def]
    """Write the scores of up to four keys that lie in a row."""
    # Keys beyond the last are the last once more; nobody reads their scores.
    w1 = keys + min(1, num_keys - 1) * row_bytes
    w2 = keys + min(2, num_keys - 1) * row_bytes
    w3 = keys + min(3, num_keys - 1) * row_bytes
    for row in range(0, rows, _FEW):
        at, to = x + row * stride, scores + row * SCORES * 4
        _dots(element, keys, w1, w2, w3, at, stride, to, SCORES * 4, stride // 4, rows - row)


@inner
def _turn(element, key, column, head_dim):  # type: ignore[no-untyped-def]
    """Write a key into one column of a panel [head_dim, PANEL]."""
    target = floats_at(column)
    if element == 0:
        source = floats_at(key)
        for d in range(head_dim):
            target[d * PANEL] = source[d]
    else:
        for d in range(head_dim):
            target[d * PANEL] = half_at(key + 2 * d) if element == 2 else brain_at(key + 2 * d)


@inner
def _score_many(panels, num_keys, rows, x, stride, scores):  # type: ignore[no-untyped-def]
    """Multiply rows with the panels of a tile's keys."""
    for key in range(0, num_keys, PANEL):
        panel = panels + key * stride
        for row in range(0, rows, _GROUP):
            at, to, left = x + row * stride, scores + (row * SCORES + key) * 4, rows - row
            _product(0, panel, PANEL * 4, at, stride, to, SCORES * 4, stride // 4, left, 0, 0, 0, 0)


@inner
def gather(words, table, head, first, num_keys, end, rows, scores, y):  # type: ignore[no-untyped-def]
    """Add each row's weighted values to its sums y [rows, head_dim]."""
    element, head_dim = words[2], words[10]
    row_bytes = head_dim * (4 if element == 0 else 2)
    key = 0
    while key < num_keys:
        values, length = _run(words, table, 1, head, first + key, end)
        count = min(length, num_keys - key)
        _add(element, values, row_bytes, head_dim, count, rows, scores + key * 4, y)
        key += count


@inner
def _add(element, values, row_bytes, head_dim, count, rows, scores, y):  # type: ignore[no-untyped-def]
    """Add the values of one run."""
    stride, apart = head_dim * 4, row_bytes // head_dim * PANEL
    is_few = rows < _MANY and head_dim % (2 * PANEL) == 0
    group, step = (_FEW, 2) if is_few else (_GROUP, 1)
    for panel in range(0, head_dim // PANEL, step):
        v, column = values + panel * apart, y + panel * PANEL * 4
        for row in range(0, rows, group):
            x, to, left = scores + row * SCORES * 4, column + row * stride, rows - row
            if is_few:
                _product_of_two(
                    element, v, row_bytes, x, SCORES * 4, to, stride, count, left, 1, apart, 0, 0
                )
            else:
                _product(element, v, row_bytes, x, SCORES * 4, to, stride, count, left, 1, 0, 0, 0)
