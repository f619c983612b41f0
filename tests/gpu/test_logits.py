"""The comparison with transformers detects logits that are rounded too much."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import logits
from tests.gpu.settings import Settings, Unavailable
from tests.gpu.verify import Wrong
from tests.kernels.shim.backend import why_not

SETTINGS = Settings("shim", seed=3, is_quick=True)


def test_logits_of_a_model_that_rounds_more_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := why_not():
        pytest.skip(reason)
    ours = logits._ours  # noqa: SLF001

    def rounded(settings: Settings, path: Path, token_ids: list[int]) -> torch.Tensor:
        return ours(settings, path, token_ids).to(torch.float8_e4m3fn).float()

    monkeypatch.setattr(logits, "_ours", rounded)
    with pytest.raises(Wrong, match="of a standard deviation from float32, transformers"):
        logits.logit_parts(SETTINGS)["logits llama"]()


def test_without_transformers_it_is_skipped_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Unavailable, match=r"transformers.*a development dependency"):
        logits.logit_parts(SETTINGS)["logits llama"]()
