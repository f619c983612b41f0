"""Sampling defaults: from the model, from elsewhere, or none; and that a request says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.api.model import ServedModel
from router.api.requests.defaults import NEUTRAL, Defaults, read_defaults
from tests.router.api.asking import complete, converse
from tests.router.site import write_model
from wire.process.model import DEMO, ModelError
from wire.process.settings import ConfigError


def write(path: Path, **values: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_a_model_recommends(tmp_path: Path) -> None:
    write(tmp_path, temperature=0.6, top_k=20, max_new_tokens=9, do_sample=True, top_p=None)
    assert read_defaults("auto", tmp_path) == Defaults(temperature=0.6, top_k=20, max_tokens=9)
    assert read_defaults("auto", tmp_path).non_neutral == {
        "temperature": 0.6,
        "top_k": 20,
        "max_tokens": 9,
    }
    assert read_defaults("none", tmp_path) == NEUTRAL
    assert read_defaults(str(tmp_path), DEMO).top_k == 20


def test_or_not(tmp_path: Path) -> None:
    assert read_defaults("auto", tmp_path) == NEUTRAL
    assert read_defaults("auto", DEMO).non_neutral == {}
    with pytest.raises(ConfigError, match=r"--generation-config .*nowhere has no"):
        read_defaults(str(tmp_path / "nowhere"), tmp_path)


@pytest.mark.parametrize("values", [{"temperature": 3}, {"top_p": 0}, {"top_k": "many"}])
def test_values_out_of_range_are_named(tmp_path: Path, values: dict[str, Any]) -> None:
    write(tmp_path, **values)
    with pytest.raises(ModelError, match=r"generation_config\.json: .*" + next(iter(values))):
        read_defaults("auto", tmp_path)


def test_a_request_is_sampled_with_them_unless_it_says_otherwise(tmp_path: Path) -> None:
    defaults = Defaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, max_tokens=9)
    model = ServedModel("letters", write_model(tmp_path), defaults)
    options = converse(model).requests[0][0].options
    assert (options.temperature, options.top_p, options.top_k) == (0.6, 0.9, 20)
    assert (options.min_p, options.max_tokens) == (0.1, 9)
    said = converse(model, temperature=0, top_k=-1, top_p=1, max_tokens=20).requests[0][0].options
    assert (said.temperature, said.top_k, said.top_p, said.max_tokens) == (0, 0, 1, 20)
    assert complete(model, prompt="a").requests[0][0].options.max_tokens == 16
    assert converse(model, messages=[{"role": "user", "content": "x" * 75}]).requests[0][
        0
    ].options.max_tokens == 100 - 75 - len("<user:\nassistant:")
