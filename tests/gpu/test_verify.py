"""The verification catches broken kernels, through the shim, and passes the reference.

That it passes kernels that are whole, `test_stages.py` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.contract import Backend, Scratch
from kernels.cuda.backend import source_text
from tests.gpu import verify
from tests.gpu.inputs import FLOOR, TOLERANCE, Shape, error, formula, lengths, paged
from tests.gpu.settings import Part, Settings
from tests.kernels.shim.backend import Shim, why_not

SETTINGS = Settings("shim", seed=5, is_quick=True)


@pytest.fixture(autouse=True)
def shim() -> None:
    if reason := why_not():
        pytest.skip(reason)


def breaking(old: str, new: str) -> Callable[[Settings, dict[str, list[str]]], Backend]:
    """Return `kernels_of` with one line of the source changed."""

    def kernels_of(settings: Settings, needed: dict[str, list[str]]) -> Backend:
        texts = {}
        for source in needed:
            text = source_text(source)
            assert text.count(old) == 1, "the mutation no longer fits the source"
            texts[source] = text.replace(old, new)
        return Shim(needed, texts=texts)

    return kernels_of


def parts() -> dict[str, Part]:
    return {
        **verify.kv_parts(SETTINGS),
        **verify.row_parts(SETTINGS),
        **verify.draw_parts(SETTINGS),
        **verify.attention_parts(SETTINGS),
        **verify.staging_parts(SETTINGS),
    }


FULL = Settings("reference", seed=5, is_quick=False)
FULL_PARTS = {
    **verify.kv_parts(FULL),
    **verify.row_parts(FULL),
    **verify.attention_parts(FULL),
}


@pytest.mark.parametrize("name", list(FULL_PARTS))
def test_the_reference_in_a_kernel_s_place_passes_the_full_check(name: str) -> None:
    figures = FULL_PARTS[name]()
    assert isinstance(figures["cases"], int) and figures["cases"] >= 8


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("heads float32", "cosine.values[k] + x.values[k] *", "cosine.values[k] - x.values[k] *"),
        ("move float32", "const int token = a.first_token + i", "const int token = i"),
        ("rows float32", "expf(-x ", "expf(x "),
        ("draw", "share_of(of.uniform, all) + 1", "share_of(of.uniform, all)"),
        ("plain 24 bfloat16", "key <= position; key++", "key < position; key++"),
        ("tiled 64 bfloat16", "a.sinks[head] * LOG2_E", "a.sinks[head]"),
    ],
)
def test_a_broken_kernel_is_wrong(
    name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "kernels_of", breaking(old, new))
    with pytest.raises(verify.Wrong):
        parts()[name]()


def test_the_formula_is_that_of_the_reference() -> None:
    shape = Shape(6, 2, 16, 8, torch.float32)
    draw = SETTINGS.random("formula")
    it = paged(lengths(draw, 200), shape, torch.device("cpu"), draw)
    sinks = torch.arange(6.0)
    for window, cap, given in ((None, None, None), (24, None, sinks), (None, 3.0, sinks)):
        softmax = (0.25, window, cap, given)
        got = reference.paged_attention(it.query, it.pool, 1, it.batch, *softmax)
        assert error(got, formula(it, 1, *softmax), 1e-4) <= 1


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("context", [300, 2980])
def test_keys_that_are_missing_from_a_long_context_show(dtype: torch.dtype, context: int) -> None:
    """The mean of 2980 keys is about 0.02: as much as bfloat16 may err about 1."""
    shape, draw = Shape(8, 2, 64, 16, dtype), SETTINGS.random("long")
    it = paged([(context, 1)], shape, torch.device("cpu"), draw)
    it.query[:, 0] = it.query[:, 1]  # the loud head hears a few keys only
    want = formula(it, 1, 0.125, None)

    def share(dropped: int) -> float:
        batch = replace(it.batch, context_lens=it.batch.context_lens - dropped, scratch=Scratch())
        got = reference.paged_attention(it.query, it.pool, 1, batch, 0.125, None)
        return error(got, want, TOLERANCE[dtype], FLOOR[dtype])

    assert share(0) <= 1 < share(64)


def test_where_a_row_is_zero_nothing_may_differ() -> None:
    want = torch.zeros(1, 2, dtype=torch.float64)
    assert error(torch.zeros(1, 2), want, 0.1) == 0
    assert error(torch.tensor([[0.0, 1e-9]]), want, 0.1) == float("inf")
    assert error(torch.tensor([[0.0, 1e-9]]), want, 0.1, floor=2e-9) == pytest.approx(0.5)


def test_an_error_is_a_share_of_the_tolerance_and_nan_is_infinite() -> None:
    want = torch.tensor([2.0, 2.0], dtype=torch.float64)
    assert error(torch.tensor([2.0, 2.0]), want, 0.1) == 0
    assert error(torch.tensor([2.4, 2.0]), want, 0.1) == pytest.approx(1.0)
    assert error(torch.tensor([2.0, float("nan")]), want, 0.1) == float("inf")
    # Beside what is large a zero may be off; alone it may not.
    want = torch.tensor([[1.0, 0.0], [0.01, 0.0]], dtype=torch.float64)
    assert error(torch.tensor([[1.0, 0.05], [0.01, 0.0]]), want, 0.1) < 1
    assert error(torch.tensor([[1.0, 0.0], [0.01, 0.05]]), want, 0.1) > 1


def test_inputs_are_those_of_the_seed_whatever_else_runs() -> None:
    draws = [Settings("shim", seed, True).random("part").random() for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]
    assert SETTINGS.random("part").random() != SETTINGS.random("other").random()
