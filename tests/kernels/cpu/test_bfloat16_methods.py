"""Which way of multiplying bfloat16 a processor is to take."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernels.cpu import amx, dot_bfloat16
from kernels.cpu.bfloat16_methods import Way, best_way, known_way, known_ways
from kernels.cpu.intrinsics import target_features


def test_vectors_are_known_everywhere_and_the_quickest_way_is_taken() -> None:
    assert known_ways()[0] is Way.VECTORS and known_ways() == sorted(known_ways())
    assert (Way.DOTS in known_ways()) == dot_bfloat16.available()
    assert (Way.TILES in known_ways()) == amx.available()
    assert known_way(None) is best_way() is max(known_ways())
    assert all(known_way(way) is way for way in known_ways())


def test_a_way_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dot_bfloat16, "available", lambda: False)
    with pytest.raises(AssertionError, match="does not multiply by"):
        known_way(Way.DOTS)


WITHOUT_TILES = """
from kernels.cpu.bfloat16_methods import Way, best_way
from kernels.cpu.linear_bfloat16 import PairedWeight
from tests.kernels.cpu import test_linear
assert best_way() is Way.DOTS
test_linear.test_gate_and_up_in_one(True, PairedWeight, Way.DOTS)
"""


@pytest.mark.skipif(not dot_bfloat16.available(), reason="this processor has no AVX512-BF16")
def test_without_tiles_it_is_dots() -> None:
    features = ",".join(sorted(target_features())).replace("+amx", "-amx")
    # A processor without tiles is named too: the name brings features of its own.
    processor = {"NUMBA_CPU_NAME": "cooperlake", "NUMBA_CPU_FEATURES": features}
    environ = os.environ | processor
    subprocess.run([sys.executable, "-c", WITHOUT_TILES], env=environ, check=True)
