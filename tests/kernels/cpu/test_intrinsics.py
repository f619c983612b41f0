"""Powers of two to the last place; numbers rounded to 16 bits as torch does."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core import config

from kernels.cpu import intrinsics


def over(function: Any) -> Any:
    """Return the function over arrays."""

    @njit
    def each(x):  # type: ignore[no-untyped-def]
        out = np.empty_like(x)
        for i in range(len(x)):
            out[i] = function(x[i])
        return out

    return each


power = over(intrinsics.exp2)
weight = njit(lambda x: intrinsics.weight_of(x))
order = njit(lambda bits: intrinsics.order_of(bits))


def test_powers_of_two_are_good_to_the_last_place_or_two() -> None:
    x = np.concatenate((np.linspace(-125.9, 0, 50_001), [-0.5, -1.5, -1e-9, -64.0])).astype(
        np.float32
    )
    want = np.exp2(x.astype(np.float64))
    assert (np.abs(power(x) - want) / want).max() < 2.0**-22
    assert power(np.zeros(1, np.float32))[0] == 1.0


def test_weights_are_the_nearest_multiples_of_their_unit() -> None:
    odd = [math.nan, -math.inf, -1e300, -65.0, -44.0, -1.0, -0.5, -1e-9, 0.0]
    x = np.concatenate((np.linspace(-45, 0, 50_001), odd))
    weights = np.array([weight(each) for each in x])
    want = np.exp2(np.nan_to_num(x, nan=-math.inf)) * 2.0**intrinsics.WEIGHT_BITS
    assert np.abs(weights - want).max() <= 0.5 + 2**-9
    assert weights[-9:-4].tolist() == [0] * 5 and weights[-1] == 1 << intrinsics.WEIGHT_BITS


def test_logits_are_ordered_as_floats_are() -> None:
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    ranked = [-math.inf, -3e38, -1.0, -tiny, 0.0, tiny, 1.0, 3e38, math.inf, math.nan]
    orders = [order(bits) for bits in np.array(ranked, np.float32).view(np.int32)]
    assert orders == sorted(set(orders))
    zeros_and_nan = np.array([-0.0, 0.0, -math.nan], np.float32).view(np.int32)
    assert [order(bits) for bits in zeros_and_nan] == [0, 0, orders[-1]]


def test_powers_far_below_are_almost_nothing() -> None:
    tiny = power(np.array([-127.0, -1e30, -math.inf], np.float32))
    assert ((tiny >= 0) & (tiny <= 2.0**-126)).all()


def test_a_processor_is_named_by_what_it_is_and_what_it_may_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = []
    monkeypatch.setattr(config, "CPU_NAME", "skylake")
    for features in ("+avx2,-fma", "-fma,+avx2,-amx-tile", "+avx2,+fma"):
        monkeypatch.setattr(intrinsics, "target_features", lambda it=features: set(it.split(",")))
        names.append(intrinsics.target_name.__wrapped__())
    assert names[0] == names[1] != names[2]
    assert all(re.fullmatch("skylake-[0-9a-f]{6}", name) for name in names)
