"""One token of each row of logits on the CPU: `kernels.sample` in a few passes over the row.

Torch makes a tensor of float64 for each step of the way and sorts for top_p: with 32 rows longer
than the model takes.  Here a thread takes a row, and the row's weights stay in its cache.  The
weight at which a filter's border lies is found digit by digit, from histograms of the weights'
bits, not by sorting: so no row, however flat, takes much longer than another.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch

from kernels.contract import SAMPLING
from kernels.cpu import threads
from kernels.cpu.intrinsics import doubles_at, exp2_double, floats_at, ints_at, longs_at, record_at
from kernels.cpu.rowwise import largest
from kernels.cpu.tasks import allocate, give_back, inner, record_of
from kernels.cpu.threads import take

_LOG2_E = math.log2(math.e)
# A weight is at most 1, its bits at most 62: digits of 11, the last one of 7.
_DIGIT, _FIRST_SHIFT = 11, 51
_RADIX = 1 << _DIGIT
# Weights that are added up at a time, to find the one that is sampled.
_PART = 512
_SETTINGS_BYTES = SAMPLING.itemsize

# What is allowed in rows where everything is: no words.
_ALL = np.empty((0, 0), np.int32)

_settings_at = record_at(numba.from_dtype(SAMPLING))


class _Arguments(NamedTuple):
    num_rows: int
    size: int
    logits: int
    row_stride: int
    settings: int
    allowed: int
    num_words: int
    sampled: int
    taken: int = 0


def argmax(logits: torch.Tensor) -> list[int]:
    """See `kernels.argmax`; NumPy takes a fifth of torch's time."""
    return logits.numpy().argmax(axis=-1).tolist()  # type: ignore[no-any-return]


def sample(
    logits: torch.Tensor,
    settings: npt.NDArray[np.void],
    allowed: npt.NDArray[np.int32] | None = None,
) -> list[int]:
    settings = np.ascontiguousarray(settings)
    bits = _ALL if allowed is None else np.ascontiguousarray(allowed)
    logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    sampled = np.empty(len(logits), np.int64)
    arguments = record_of(
        _Arguments(
            num_rows=len(logits),
            size=logits.shape[1],
            logits=logits.data_ptr(),
            row_stride=logits.stride(0) * 4,
            settings=settings.ctypes.data,
            allowed=bits.ctypes.data,
            num_words=bits.shape[1],
            sampled=sampled.ctypes.data,
        )
    )
    # Not as a program: making one for a single run takes longer than sampling from a short row.
    threads.run(_sample_rows, arguments.ctypes.data)
    return sampled.tolist()


def _sample_rows(a: _Arguments, _thread: int) -> None:
    weights = allocate((a.size + _RADIX + a.size) * 8)
    histogram = weights + a.size * 8
    gathered = histogram + _RADIX * 8
    places = gathered + a.size * 4
    while True:
        row = take(a, 1)
        if row >= a.num_rows:
            break
        settings = _settings_at(a.settings + row * _SETTINGS_BYTES)
        logits, size = a.logits + row * a.row_stride, a.size
        if a.num_words:
            bits = a.allowed + row * a.num_words * 4
            size = _gather(logits, size, bits, a.num_words, gathered, places)
            logits = gathered
        if size == 0:
            place = -1
        elif settings.temperature == 0.0:
            place = _first_largest(floats_at(logits), size)
        else:
            _weigh(logits, settings.temperature, weights, size)
            _filter(weights, size, settings, histogram)
            place = _find(weights, size, settings.uniform)
        if a.num_words and place >= 0:
            place = ints_at(places)[place]
        longs_at(a.sampled)[row] = place
    give_back(weights)


@inner
def _gather(
    logits: int, size: int, allowed: int, num_words: int, gathered: int, places: int
) -> int:
    """Write the allowed logits, and where they are, side by side; return how many they are."""
    logit, bits, kept, place = (
        floats_at(logits),
        ints_at(allowed),
        floats_at(gathered),
        ints_at(places),
    )
    num = 0
    for word in range(min(num_words, (size + 31) // 32)):
        rest, first = bits[word], word * 32
        if rest == 0:
            continue
        for i in range(first, min(first + 32, size)):
            # Every one is written: to go round some would be a guess of the processor's each.
            kept[num] = logit[i]
            place[num] = i
            num += (rest >> (i - first)) & 1
    return num


@inner
def _first_largest(logit: Any, size: int) -> int:
    best = 0
    for i in range(size):
        if logit[i] > logit[best]:
            best = i
    return best


@inner
def _weigh(logits: int, temperature: float, weights: int, size: int) -> None:
    """Write exp((logit - largest) / temperature); 0 for what is not a number."""
    logit, weight = floats_at(logits), doubles_at(weights)
    most = np.float64(largest(logit, 0, size, np.float32(-np.inf)))
    for i in range(size):
        # Relative to the largest, no temperature is small enough to overflow.
        x = (np.float64(logit[i]) - most) / temperature * _LOG2_E
        weight[i] = exp2_double(x) if x > -1022.0 else 0.0


@inner
def _filter(weights: int, size: int, settings: Any, histogram: int) -> None:
    """Zero the weights that do not pass."""
    top_k, top_p, min_p = np.float64(settings.top_k), settings.top_p, settings.min_p
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
def _drop(weights: int, size: int, border: int) -> None:
    """Zero the weights whose bits are under a border; bits of positive numbers are in order."""
    bits = longs_at(weights)
    for i in range(size):
        bits[i] = bits[i] if bits[i] >= border else 0


@inner
def _border(weights: int, size: int, wanted: Any, is_count: bool, histogram: int) -> int:
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
def _sum(weights: int, first: int, last: int) -> float:
    weight, total = doubles_at(weights), 0.0
    for i in range(first, last):
        total += weight[i]
    return total


@inner
def _find(weights: int, size: int, uniform: float) -> int:
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
