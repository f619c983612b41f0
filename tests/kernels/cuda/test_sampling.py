"""The GPU draws the tokens of the CPU, whatever the logits; the kernel runs through the shim."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from kernels.contract import Backend
from kernels.cpu.intrinsics import POWER_SERIES
from kernels.cuda import backend as cuda
from kernels.cuda import sampling
from tests.kernels import draw_scenes
from tests.kernels.draw_scenes import FILTERS, check
from tests.kernels.instances import SAMPLING_KERNELS
from tests.kernels.shim.backend import Shim, why_not


@cache
def shim(order: int = 2) -> Backend:
    if reason := why_not():
        pytest.skip(reason)
    return Shim({"sampling": SAMPLING_KERNELS}, order=order)


def test_every_kind_of_row_with_every_filter() -> None:
    draw_scenes.check_all(shim())


@pytest.mark.parametrize("kind", ["peaked", "flat", "equal"])
def test_a_large_vocabulary(kind: str) -> None:
    logits = draw_scenes.logits_of(kind, 2, 151_937, 3)
    for changes in ({}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.9}):
        check(shim(), logits, draw_scenes.settings_of(2, 5, **changes))


@pytest.mark.parametrize("order", [0, 1])
def test_any_order_of_threads_draws_the_same(order: int) -> None:
    logits = draw_scenes.logits_of("peaked", 2, 3000, 1)
    for changes in FILTERS:
        check(shim(order), logits, draw_scenes.settings_of(2, 5, **changes))


def test_rows_of_another_dtype_and_layout() -> None:
    logits, settings = torch.randn(300, 6).bfloat16().t(), draw_scenes.settings_of(6, 1, top_p=0.9)
    check(shim(), logits, settings)
    wide = draw_scenes.logits_of("peaked", 6, 400, 2)
    check(shim(), wide[:, 3:333], settings)
    check(shim(), wide[:0], settings[:0])


def test_the_struct_and_the_series_are_those_of_the_source() -> None:
    text = cuda.source_text("sampling")
    found = re.search(r"struct Draw {(.*?)};", text, re.S)
    assert found is not None
    fields = re.findall(r"(\w+)[,;]", re.sub(r"//.*", "", found[1]))
    assert fields == [field[0] for field in sampling.DRAW._fields_]
    found = re.search(r"POWER_SERIES\[13\] = {(.*?)};", text, re.S)
    assert found is not None
    assert tuple(float(it) for it in found[1].split(",") if it.strip()) == POWER_SERIES
