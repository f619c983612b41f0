"""config.json of the four families: what is read, what is defaulted, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wire.process import model
from worker.model.config import FAMILIES, ModelConfig, ModelError, read_config

MINIMAL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(path: Path, **changes: Any) -> ModelConfig:
    whole = {**MINIMAL, **changes}
    kept = {key: value for key, value in whole.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(kept))
    return read_config(path)


def test_a_minimal_llama(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert (config.head_dim, config.max_positions, config.norm_eps) == (16, 2048, 1e-6)
    assert config.windows == (None, None, None)
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    assert not config.tied_embeddings
    assert config.dtype == "float32"
    assert config.eos_token_ids == frozenset()


def test_the_families_differ_in_data(tmp_path: Path) -> None:
    llama = read(tmp_path, attention_bias=True, mlp_bias=True, num_key_value_heads=...)
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias and llama.num_kv_heads == 4
    mistral = read(tmp_path, model_type="mistral")
    assert mistral.windows == (4096,) * 3 and not mistral.qkv_bias
    assert read(tmp_path, model_type="mistral", sliding_window=None).windows == (None,) * 3
    qwen2 = read(tmp_path, model_type="qwen2")
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    qwen3 = read(tmp_path, model_type="qwen3")
    assert qwen3.qk_norm and qwen3.head_dim == 128 and not qwen3.qkv_bias
    assert read(tmp_path, model_type="qwen3", head_dim=32).head_dim == 32


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen(tmp_path: Path, family: str) -> None:
    def windows(**changes: Any) -> tuple[int | None, ...]:
        return read(tmp_path, model_type=family, **changes).windows

    assert windows(sliding_window=8, max_window_layers=1) == (None,) * 3
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert windows(**on, max_window_layers=1) == (None, 8, 8)
    assert windows(**on, max_window_layers=0) == (8, 8, 8)
    assert windows(**on, max_window_layers=9) == (None,) * 3
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(**on, layer_types=kinds) == (8, None, 8)
    with pytest.raises(ModelError, match="use_sliding_window"):
        windows(layer_types=kinds)
    for wrong in (kinds[:2], ["full_attention", "mamba", "full_attention"], "full_attention"):
        with pytest.raises(ModelError, match="layer_types"):
            windows(**on, layer_types=wrong)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_spellings(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, **{key: "bfloat16"}).dtype == "bfloat16"


def test_eos_comes_from_generation_config_first(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=2).eos_token_ids == {2}
    assert read(tmp_path, eos_token_id=[2, 5]).eos_token_ids == {2, 5}
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert read(tmp_path, eos_token_id=2).eos_token_ids == {7, 8}
    generation.write_text(json.dumps({"temperature": 1}))
    assert read(tmp_path, eos_token_id=2).eos_token_ids == {2}
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": ...}, "model_type is None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"hidden_size": 66}, "hidden_size is 66"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling: rope_type is 'yarn'",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_refusals_name_the_file_and_the_key(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError) as raised:
        read(tmp_path, **changes)
    assert words in str(raised.value) and str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\udcff"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Hugging Face"):
        read_config(tmp_path)


def test_every_family_is_known() -> None:
    assert set(FAMILIES) == {"llama", "mistral", "qwen2", "qwen3"}


def test_the_families_are_those_that_a_router_lets_pass() -> None:
    assert tuple(FAMILIES) == model.FAMILIES
