"""A model computes by the pass that fits it, or says which setting asks for what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.cpu import linear_int8
from scripts.models.make_model import make_model
from wire.process.model import ModelError
from worker.compute.compiled import CompiledTransformer
from worker.compute.model import load_model
from worker.compute.transformer import Transformer

CPU = torch.device("cpu")


def test_compiled_loops_where_shapes_and_layers_have_them(tmp_path: Path) -> None:
    fits = make_model(tmp_path / "fits", head_dim=32, hidden_size=64, intermediate_size=128)
    odd = make_model(tmp_path / "odd", head_dim=32, hidden_size=72, intermediate_size=120)
    states = make_model(tmp_path / "states", family="qwen3_next")
    for path, kind in ((fits, CompiledTransformer), (odd, Transformer), (states, Transformer)):
        assert isinstance(load_model(path, torch.float32, CPU, compiled=True), kind)
    assert isinstance(load_model(fits, torch.float32, CPU), Transformer)


def test_int8_is_refused_where_there_are_no_loops(tmp_path: Path) -> None:
    path = make_model(tmp_path, family="qwen3_next", head_dim=32, moe_intermediate_size=64)
    with pytest.raises(ModelError, match="layers of qwen3_next have what there are no loops for"):
        load_model(path, None, CPU, compiled=True, in_int8=True)


def test_int8_is_refused_for_shapes_that_fill_no_panels(tmp_path: Path) -> None:
    path = make_model(tmp_path, head_dim=32, hidden_size=72, intermediate_size=120)
    with pytest.raises(ModelError, match=f"at most {linear_int8.MAX_INPUTS}, these are 72, 120"):
        load_model(path, None, CPU, compiled=True, in_int8=True)
