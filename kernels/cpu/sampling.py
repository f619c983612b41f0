"""Draw one token from each row of logits on the CPU: `kernels.draw` in a few passes over a row.

Torch creates a float64 tensor for each step of the computation and sorts for top_p: with 32 rows
that takes longer than the model.  Here a thread takes a row, and the row's weights stay in its
cache.  The threshold of a filter is found by radix select, from histograms of the logits' bits, not
by sorting: so no row, however flat, takes much longer than another.  `kernels.contract.SAMPLING`
specifies the result to the bit; csrc/sampling.cu computes the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from kernels.contract import SAMPLING
from kernels.cpu import threads
from kernels.cpu.intrinsics import (
    WEIGHT_BITS,
    floats_at,
    ints_at,
    longs_at,
    order_of,
    record_at,
    weight_of,
)
from kernels.cpu.tasks import allocate, exact, free, inner, record_of
from kernels.cpu.threads import take

_LOG2_E = 1.4426950408889634
_MOST = float(np.finfo(np.float64).max)
_UNIT = float(1 << WEIGHT_BITS)
# Digits of radix select: the 32 bits that order logits as 11, 11 and 10.
_DIGIT, _FIRST_SHIFT = 11, 21
_RADIX = 1 << _DIGIT
# The least int32; subtracting it makes the order of a logit non-negative.
_LEAST = -(1 << 31)
# Weights that are summed at a time, to find the token that is drawn.
_PART = 512
_SETTINGS_BYTES = SAMPLING.itemsize

_settings_at = record_at(numba.from_dtype(SAMPLING))


class _Arguments(NamedTuple):
    num_rows: int
    size: int
    logits: int
    row_stride: int
    settings: int
    allowed: int
    num_words: int
    drawn: int
    taken: int = 0


def draw(
    logits: torch.Tensor, settings: torch.Tensor | None = None, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    if settings is None and allowed is None:  # NumPy takes a fifth of torch's time
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    if settings is None:
        settings = torch.zeros(len(logits), _SETTINGS_BYTES // 8, dtype=torch.int64)
    logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    drawn = torch.empty(len(logits), dtype=torch.int64)
    arguments = record_of(
        _Arguments(
            num_rows=len(logits),
            size=logits.shape[1],
            logits=logits.data_ptr(),
            row_stride=logits.stride(0) * 4,
            settings=settings.data_ptr(),
            allowed=0 if allowed is None else allowed.data_ptr(),
            num_words=0 if allowed is None else allowed.shape[1],
            drawn=drawn.data_ptr(),
        )
    )
    # Not as a program: building one for a single run takes longer than drawing from a short row.
    threads.run(_draw_rows, arguments.ctypes.data)
    return drawn


def _draw_rows(a: _Arguments, _thread: int) -> None:
    weights = allocate(_RADIX * 8 + a.size * 20)
    histogram = weights + a.size * 8
    orders = histogram + _RADIX * 8
    gathered = orders + a.size * 4
    indices = gathered + a.size * 4
    while True:
        row = take(a, 1)
        if row >= a.num_rows:
            break
        settings = _settings_at(a.settings + row * _SETTINGS_BYTES)
        logits, size = a.logits + row * a.row_stride, a.size
        if a.allowed:
            bits = a.allowed + row * a.num_words * 4
            size = _gather(logits, size, bits, a.num_words, gathered, indices)
            logits = gathered
        index = -1
        if size:
            index = _order(logits, orders, size)
            if settings.temperature != 0.0:
                most = np.float64(floats_at(logits)[index])
                _weigh(logits, most, settings.temperature, weights, size)
                _filter(orders, weights, size, settings, histogram)
                index = _find(weights, size, settings.uniform)
            if a.allowed:
                index = ints_at(indices)[index]
        longs_at(a.drawn)[row] = index
    free(weights)


@inner
def _gather(
    logits: int, size: int, allowed: int, num_words: int, gathered: int, indices: int
) -> int:
    """Write the allowed logits and their token ids without gaps; return how many there are."""
    logit, bits, kept, index = (
        floats_at(logits),
        ints_at(allowed),
        floats_at(gathered),
        ints_at(indices),
    )
    num = 0
    for word in range(min(num_words, (size + 31) // 32)):
        rest, first = bits[word], word * 32
        if rest == 0:
            continue
        for i in range(first, min(first + 32, size)):
            # Write every logit, and advance after allowed ones only: a branch would often be
            # mispredicted.
            kept[num] = logit[i]
            index[num] = i
            num += (rest >> (i - first)) & 1
    return num


@inner
def _order(logits: int, orders: int, size: int) -> int:
    """Write the order of each logit; return the index of the largest, the first of equals."""
    bits, order, most, index = ints_at(logits), ints_at(orders), np.int32(_LEAST), 0
    for i in range(size):
        order[i] = order_of(bits[i])
        most = order[i] if order[i] > most else most
    while order[index] != most:
        index += 1
    return index


@exact
def _weigh(logits: int, most: float, temperature: float, weights: int, size: int) -> None:
    """Write the weights; relative to the largest, no temperature is small enough to overflow."""
    logit, weight = floats_at(logits), longs_at(weights)
    factor = min(_LOG2_E / temperature, _MOST)
    for i in range(size):
        weight[i] = weight_of((np.float64(logit[i]) - most) * factor)


@inner
def _filter(orders: int, weights: int, size: int, settings: Any, histogram: int) -> None:
    """Set the weights that do not pass the filters to 0."""
    weight = longs_at(weights)
    if 0 < settings.top_k < size:
        threshold = _threshold(orders, weights, size, settings.top_k, True, histogram)
        _drop(orders, weights, size, threshold)
    if settings.top_p < 1.0:
        wanted = np.int64(settings.top_p * np.float64(_sum(weight, 0, size)))
        threshold = _threshold(orders, weights, size, max(np.int64(1), wanted), False, histogram)
        _drop(orders, weights, size, threshold)
    if settings.min_p > 0.0:
        least = np.int64(settings.min_p * _UNIT)
        for i in range(size):
            weight[i] = weight[i] if weight[i] >= least else 0


@inner
def _drop(orders: int, weights: int, size: int, threshold: int) -> None:
    """Set the weights of logits below a threshold to 0."""
    order, weight, least = ints_at(orders), longs_at(weights), np.int32(threshold)
    for i in range(size):
        weight[i] = weight[i] if order[i] >= least else 0


@inner
def _threshold(
    orders: int, weights: int, size: int, wanted: Any, is_count: bool, histogram: int
) -> int:
    """Return the largest threshold such that enough logits are not below it, by radix select.

    With `is_count`, enough means `wanted` logits; otherwise logits whose weights sum to `wanted`.
    If all logits are not enough, return the least threshold.
    """
    order, weight, sums = ints_at(orders), longs_at(weights), longs_at(histogram)
    shift, prefix = _FIRST_SHIFT, 0
    while True:
        digit_bits = _DIGIT if shift else _FIRST_SHIFT % _DIGIT
        for digit in range(_RADIX):
            sums[digit] = 0
        for i in range(size):
            bits = order[i] - _LEAST
            if bits >> (shift + digit_bits) == prefix:
                sums[bits >> shift & ((1 << digit_bits) - 1)] += 1 if is_count else weight[i]
        digit = (1 << digit_bits) - 1
        while digit >= 0 and sums[digit] < wanted:
            wanted -= sums[digit]
            digit -= 1
        if digit < 0:
            return _LEAST
        prefix = prefix << digit_bits | digit
        if shift == 0:
            return prefix + _LEAST
        shift = max(0, shift - _DIGIT)


@inner
def _sum(weight: Any, first: int, last: int) -> int:
    total = 0
    for i in range(first, last):
        total += weight[i]
    return total


@inner
def _find(weights: int, size: int, uniform: float) -> int:
    """Return the first index at which the cumulative weight exceeds `uniform` times the sum."""
    weight, first = longs_at(weights), 0
    rest = np.int64(uniform * np.float64(_sum(weight, 0, size)))
    while first + _PART < size:
        part = _sum(weight, first, first + _PART)
        if part > rest:
            break
        rest -= part
        first += _PART
    for i in range(first, size):
        if weight[i] > rest:
            return i
        rest -= weight[i]
    return size - 1
