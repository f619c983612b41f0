"""The verification catches broken kernels, through the shim, and passes the reference.

That it passes kernels that are whole, `test_stages.py` shows.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.contract import Backend, Scratch
from kernels.cuda.backend import source_text
from tests.gpu import verify
from tests.gpu.settings import Settings
from tests.kernels.scenes import TOLERANCE, check, scene
from tests.kernels.shim.backend import Shim, why_not

SETTINGS = Settings("shim", seed=5, is_quick=True)
FULL = Settings("reference", seed=5, is_quick=False)
FULL_PARTS = verify.kv_parts(FULL) | verify.row_parts(FULL) | verify.attention_parts(FULL)


@pytest.mark.parametrize(
    "name", ["heads float16", "move bfloat16", "rows float16", "plain 40 float16"]
)
def test_the_reference_in_a_kernel_s_place_passes_the_full_check(name: str) -> None:
    figures = FULL_PARTS[name]()
    assert isinstance(figures["cases"], int) and figures["cases"] >= 4


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("rows float32", "expf(-x ", "expf(x "),
        ("plain 24 bfloat16", "key <= position; key++", "key < position; key++"),
    ],
)
def test_a_broken_kernel_is_wrong_and_its_inputs_are_named(
    name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not():
        pytest.skip(reason)

    def kernels_of(settings: Settings, needed: dict[str, list[str]]) -> Backend:
        texts = {source: source_text(source).replace(old, new) for source in needed}
        assert all(text != source_text(source) for source, text in texts.items())
        return Shim(needed, texts=texts)

    monkeypatch.setattr(verify, "kernels_of", kernels_of)
    with pytest.raises(verify.Wrong, match="inputs: "):
        (verify.row_parts(SETTINGS) | verify.attention_parts(SETTINGS))[name]()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("context", [300, 2980])
def test_keys_that_are_missing_from_a_long_context_show(dtype: torch.dtype, context: int) -> None:
    """The mean of 2980 keys is about 0.02: as much as bfloat16 may err about 1."""
    it = scene([(context, 1)], num_heads=8, head_dim=64, dtype=dtype)
    it.query[:, 0] = it.query[:, 1]  # the loud head hears a few keys only
    check(it, None)

    def deaf(query: Any, pool: Any, layer: Any, batch: Any, softmax: Any) -> torch.Tensor:
        short = replace(batch, context_lens=batch.context_lens - 64, scratch=Scratch())
        return reference.paged_attention(query, pool, layer, short, softmax)

    with pytest.raises(AssertionError):
        check(it, None, SimpleNamespace(paged_attention=deaf))


def test_inputs_are_those_of_the_seed_whatever_else_runs() -> None:
    draws = [Settings("shim", seed, True).random("part").random() for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]
    assert SETTINGS.random("part").random() != SETTINGS.random("other").random()
