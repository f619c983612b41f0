"""Powers of two to the last place; bits that travel."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from numba import njit

from kernels import scalars


@njit
def power(x):  # type: ignore[no-untyped-def]
    out = np.empty_like(x)
    for i in range(len(x)):
        out[i] = scalars.exp2(x[i])
    return out


def test_powers_of_two_are_good_to_the_last_place_or_two() -> None:
    x = np.concatenate((np.linspace(-125.9, 0, 50_001), [-0.5, -1.5, -1e-9, -64.0])).astype(
        np.float32
    )
    want = np.exp2(x.astype(np.float64))
    assert (np.abs(power(x) - want) / want).max() < 2.0**-22
    assert power(np.zeros(1, np.float32))[0] == 1.0


def test_powers_far_below_are_almost_nothing() -> None:
    tiny = power(np.array([-127.0, -1e30, -math.inf], np.float32))
    assert ((tiny >= 0) & (tiny <= 2.0**-126)).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38, 1e-42, math.inf])
def test_bits_travel_in_an_integer(value: float) -> None:
    @njit
    def back(bits):  # type: ignore[no-untyped-def]
        return scalars.float_of_bits(bits)

    assert struct.pack("f", back(scalars.bits_of(value))) == struct.pack("f", value)
