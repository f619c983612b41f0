"""The GPU draws the tokens of the CPU, whatever the logits; the kernel runs through the shim."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.contract import Backend
from kernels.cpu.intrinsics import POWER_SERIES
from kernels.cuda import backend as cuda
from kernels.cuda import sampling
from tests.kernels import draw_scenes
from tests.kernels.backends import BACKENDS, backend_named
from tests.kernels.draw_scenes import FILTERS, KINDS, SIZES, TEMPERATURES, check
from tests.kernels.instances import SAMPLING_KERNELS
from tests.kernels.shim.backend import Shim, why_not


@cache
def shim(order: int = 2) -> Shim:
    return Shim({"sampling": SAMPLING_KERNELS}, order=order)


def backend(name: str) -> Backend:
    return backend_named(name, shim)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_kind_of_row_with_every_filter(name: str) -> None:
    draw_scenes.check_all(backend(name), "cuda" if name == "cuda" else "cpu")


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60)
@given(
    rows=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=4),
    size=st.sampled_from(SIZES) | st.integers(1, 3000),
    changes=st.sampled_from(FILTERS),
    temperature=st.sampled_from(TEMPERATURES) | st.floats(0.01, 3),
    share=st.none() | st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_tokens_are_those_of_the_cpu(
    name: str,
    rows: list[str],
    size: int,
    changes: dict[str, float],
    temperature: float,
    share: float | None,
    seed: int,
) -> None:
    logits = torch.cat([draw_scenes.logits_of(kind, 1, size, seed) for kind in rows])
    given_to = draw_scenes.settings_of(len(rows), seed, **{"temperature": temperature, **changes})
    allowed = None if share is None else draw_scenes.allowed_of(len(rows), size, seed, share)
    check(backend(name), logits, given_to, allowed, "cuda" if name == "cuda" else "cpu")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", ["peaked", "flat", "equal"])
def test_a_large_vocabulary(name: str, kind: str) -> None:
    serving, device = backend(name), "cuda" if name == "cuda" else "cpu"
    logits = draw_scenes.logits_of(kind, 2, 151_937, 3)
    for changes in ({}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.9}):
        check(serving, logits, draw_scenes.settings_of(2, 5, **changes), None, device)


@pytest.mark.parametrize("order", [0, 1])
def test_any_order_of_threads_draws_the_same(order: int) -> None:
    if reason := why_not():
        pytest.skip(reason)
    logits = draw_scenes.logits_of("peaked", 2, 3000, 1)
    for changes in FILTERS:
        check(shim(order), logits, draw_scenes.settings_of(2, 5, **changes))


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_of_another_dtype_and_layout(name: str) -> None:
    serving, device = backend(name), "cuda" if name == "cuda" else "cpu"
    logits, given_to = torch.randn(300, 6).bfloat16().t(), draw_scenes.settings_of(6, 1, top_p=0.9)
    check(serving, logits, given_to, None, device)
    wide = draw_scenes.logits_of("peaked", 6, 400, 2)
    check(serving, wide[:, 3:333], given_to, None, device)
    check(serving, wide[:0], given_to[:0], None, device)


def test_the_struct_and_the_series_are_those_of_the_source() -> None:
    text = cuda.source_text("sampling")
    found = re.search(r"struct Draw {(.*?)};", text, re.S)
    assert found is not None
    fields = re.findall(r"(\w+)[,;]", re.sub(r"//.*", "", found[1]))
    assert fields == [field[0] for field in sampling.DRAW._fields_]
    found = re.search(r"POWER_SERIES\[13\] = {(.*?)};", text, re.S)
    assert found is not None
    assert tuple(float(it) for it in found[1].split(",") if it.strip()) == POWER_SERIES
