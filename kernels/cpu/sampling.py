"""One token of each row of logits, drawn by a number: `worker.sampler` on the CPU, in a few passes.

Torch makes a tensor of float64 for each step of the way and sorts for top_p: with 32 rows longer
than the model takes.  Here a row is one share, and its weights stay in a cache.  The weight at
which a filter's border lies is found digit by digit, from histograms of their bits, not by sorting:
so no row, however flat, takes much longer than another.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu import threads as team
from kernels.cpu.intrinsics import doubles_at, exp2_double, fetch_add, floats_at, longs_at
from kernels.cpu.rowwise import largest
from kernels.cpu.threads import compiled, inner

# Of each row, float64: its columns in `draw`.
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _UNIFORM, _COLUMNS = range(6)
_LOG2_E = math.log2(math.e)
# A weight is at most 1, its bits at most 62: digits of 11, the last one of 7.
_DIGIT, _FIRST_SHIFT = 11, 51
_RADIX = 1 << _DIGIT
# Weights that are added up at a time, to find the one that is drawn.
_PART = 512


def draw(logits: torch.Tensor, settings: npt.NDArray[np.float64]) -> list[int]:
    """Draw a token id for each row.

    Args:
        logits: [R, V] of a float dtype on the CPU.
        settings: [R, 5]: temperature (over 0), top_k (0 for none), top_p, min_p, and the number in
            [0, 1) that decides.
    """
    settings = np.ascontiguousarray(settings)
    logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    drawn = np.empty(len(logits), np.int64)
    own = (
        len(logits),
        logits.shape[1],
        logits.data_ptr(),
        logits.stride(0) * 4,
        settings.ctypes.data,
        drawn.ctypes.data,
    )
    # A program, to be run once, would take longer to write down than a short row to draw.
    words = np.array((0, 0, *own), np.int64)
    words[0] = words[1:].ctypes.data
    team.run(task(), words.ctypes.data)
    return drawn.tolist()


@cache
def task() -> Any:
    """Return the compiled loop over rows."""
    return compiled(_draw_rows)


def _draw_rows(words, _thread):  # type: ignore[no-untyped-def]
    rows, size = words[2], words[3]
    memory = np.empty(size + _RADIX, np.float64)
    weights, histogram = memory.ctypes.data, memory.ctypes.data + size * 8
    while True:
        row = fetch_add(words[0], 1)
        if row >= rows:
            return
        settings = doubles_at(words[6] + row * _COLUMNS * 8)
        _weigh(words[4] + row * words[5], settings[_TEMPERATURE], weights, size)
        _filter(weights, size, settings, histogram)
        longs_at(words[7])[row] = _find(weights, size, settings[_UNIFORM])


@inner
def _weigh(logits, temperature, weights, size):  # type: ignore[no-untyped-def]
    """Write exp((logit - largest) / temperature); 0 for what is not a number."""
    logit, weight = floats_at(logits), doubles_at(weights)
    most = np.float64(largest(logit, 0, size, np.float32(-np.inf)))
    for i in range(size):
        # Relative to the largest, no temperature is small enough to overflow.
        x = (np.float64(logit[i]) - most) / temperature * _LOG2_E
        weight[i] = exp2_double(x) if x > -1022.0 else 0.0


@inner
def _filter(weights, size, settings, histogram):  # type: ignore[no-untyped-def]
    """Zero the weights that do not pass."""
    top_k, top_p, min_p = settings[_TOP_K], settings[_TOP_P], settings[_MIN_P]
    if 0.0 < top_k < size:
        _drop(weights, size, _border(weights, size, top_k, True, histogram))
    if top_p < 1.0:
        wanted = top_p * _sum(weights, 0, size)
        _drop(weights, size, _border(weights, size, wanted, False, histogram))
    if min_p > 0.0:
        weight = doubles_at(weights)
        for i in range(size):
            weight[i] = weight[i] if weight[i] >= min_p else 0.0


@inner
def _drop(weights, size, border):  # type: ignore[no-untyped-def]
    """Zero the weights whose bits are under a border; bits of positive numbers are in order."""
    bits = longs_at(weights)
    for i in range(size):
        bits[i] = bits[i] if bits[i] >= border else 0


@inner
def _border(weights, size, wanted, is_count, histogram):  # type: ignore[no-untyped-def]
    """Return the largest bits such that the weights not under them are `wanted`, or sum to it."""
    weight, bits, held_by = doubles_at(weights), longs_at(weights), doubles_at(histogram)
    shift, prefix, held = _FIRST_SHIFT, 0, 0.0
    while True:
        digit_bits = _DIGIT if shift else _FIRST_SHIFT % _DIGIT
        for digit in range(_RADIX):
            held_by[digit] = 0.0
        for i in range(size):
            if bits[i] >> (shift + digit_bits) == prefix:
                digit = bits[i] >> shift & ((1 << digit_bits) - 1)
                held_by[digit] += 1.0 if is_count else weight[i]
        digit, last = (1 << digit_bits) - 1, 0
        while digit >= 0 and held + held_by[digit] < wanted:
            if held_by[digit] > 0.0:
                held += held_by[digit]
                last = digit
            digit -= 1
        # Sums in two orders can differ in the last place: then the least there is, is the border.
        if digit < 0:
            held -= held_by[last]
            digit = last
        prefix = prefix << digit_bits | digit
        if shift == 0:
            return prefix
        shift = max(0, shift - _DIGIT)


@inner
def _sum(weights, first, last):  # type: ignore[no-untyped-def]
    weight, total = doubles_at(weights), 0.0
    for i in range(first, last):
        total += weight[i]
    return total


@inner
def _find(weights, size, uniform):  # type: ignore[no-untyped-def]
    """Return the first place at which the cumulated weight exceeds a share of the whole."""
    total = 0.0
    for first in range(0, size, _PART):
        total += _sum(weights, first, min(first + _PART, size))
    target, held, first = uniform * total, 0.0, 0
    while first + _PART < size:
        part = _sum(weights, first, first + _PART)
        if held + part > target:
            break
        held += part
        first += _PART
    weight, last = doubles_at(weights), size - 1
    for i in range(first, size):
        if weight[i] > 0.0:
            last = i
            held += weight[i]
            if held > target:
                break
    # A row that is not a number has no weight at all: any token, but one that there is.
    return last
