"""The checkpoint writer: reproducible, and its command line reaches config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.models.make_model import LIKE, make_model, parse_args, tensor_shapes


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    one, same, other = (
        make_model(tmp_path / name, seed=seed).joinpath("model.safetensors").read_bytes()
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one == same != other


def test_flags_reach_the_config(tmp_path: Path) -> None:
    argv = ["--family", "qwen3", "--layers", "1", "--kv-heads", "1", "--head-dim", "8"]
    argv += ["--vocab-size", "40", "--dtype", "bfloat16", "--tied", "--shards", "2", "--seed", "3"]
    out = make_model(**vars(parse_args([*argv, "--out", str(tmp_path)])))
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (1, 1)
    assert (config["head_dim"], config["vocab_size"], config["dtype"]) == (8, 40, "bfloat16")
    assert config["tie_word_embeddings"]
    assert len(list(out.glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("like", "millions"),
    [
        ("smollm2-135m", 134.5),
        ("qwen3-0.6b", 596.0),
        ("qwen3-30b-a3b", 30_532.1),
        ("gemma-3-1b", 999.9),
    ],
)
def test_shapes_of_public_models(like: str, millions: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LIKE[like]))
    total = sum(shape.numel() for shape in tensor_shapes(tmp_path).values())
    assert total / 1e6 == pytest.approx(millions, abs=0.1)
