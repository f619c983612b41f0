"""config.json: what is read, what is defaulted, what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kernels import GELU_TANH, Activation
from worker.model.config import ModelConfig, ModelError, read_config

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


def test_what_gemma_3_leaves_out(tmp_path: Path) -> None:
    """The config.json of a multimodal checkpoint says little of its text part."""
    said = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    whole = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": said}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_config(tmp_path)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262_208, 8, 4)
    assert (config.head_dim, config.max_positions, config.dtype) == (256, 131_072, "bfloat16")
    assert config.windows[:7] == (4096,) * 5 + (None,) + (4096,)
    assert [layer.rope.theta for layer in config.layers[4:6]] == [10_000.0, 1_000_000.0]
    assert config.qk_norm and config.post_norms and config.norm_shift == 1.0
    assert config.embedding_scale == 2560**0.5 and config.attention_scale == 256**-0.5
    assert config.activation == GELU_TANH and config.tied_embeddings and config.is_multimodal


def test_gemma_3_of_text_alone(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="gemma3_text", query_pre_attn_scalar=168, head_dim=128)
    assert not config.is_multimodal and config.attention_scale == 168**-0.5
    with pytest.raises(ModelError, match="query_pre_attn_scalar is 0"):
        read(tmp_path, model_type="gemma3_text", query_pre_attn_scalar=0)


def test_what_gpt_oss_leaves_out(tmp_path: Path) -> None:
    """Its config.json says the dtype by the quantization, and biases not at all."""
    config = read(
        tmp_path,
        model_type="gpt_oss",
        quantization_config={"quant_method": "mxfp4"},
        num_attention_heads=...,
        num_key_value_heads=...,
        vocab_size=...,
    )
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (201_088, 64, 8)
    assert (config.head_dim, config.max_positions, config.dtype) == (64, 131_072, "bfloat16")
    assert config.windows == (128, None, 128) and config.has_sinks
    assert config.qkv_bias and config.o_bias and not config.mlp_bias and not config.qk_norm
    assert config.activation == Activation(1.702, 0.0, limit=7.0, shift=1.0)
    assert all(layer.experts is not None for layer in config.layers)
    assert config.layers[0].rope.score_factor == pytest.approx((0.1 * math.log(32) + 1) ** 2)


def test_what_qwen3_next_leaves_out(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="qwen3_next", num_hidden_layers=8, num_key_value_heads=...)
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (2, 256, 32_768)
    assert [layer.delta is None for layer in config.layers] == [False, False, False, True] * 2
    assert config.windows == (None, None) and len(config.delta_layers) == 6
    assert config.has_output_gate and config.qk_norm and config.norm_shift == 1.0
    assert (config.layers[3].rope.head_dim, config.layers[3].rope.num_still) == (64, 192)
    assert all(layer.experts is not None for layer in config.layers)


def test_sizes_of_feed_forwards_are_those_that_layers_have(tmp_path: Path) -> None:
    assert read(tmp_path).intermediate_sizes == {96}
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16}
    config = read(tmp_path, **experts, mlp_only_layers=[1])
    assert [layer.experts is None for layer in config.layers] == [False, True, False]
    assert config.intermediate_sizes == {96, 16}
    assert read(tmp_path, **experts).intermediate_sizes == {16}


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
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"hidden_size": 66}, "hidden_size is 66"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu'], not one of silu, swish, gelu_pytorch"),
        (
            {"model_type": "gemma3_text", "hidden_activation": "relu"},
            "hidden_activation is 'relu'",
        ),
        ({"model_type": "gemma3", "text_config": 5}, "text_config is 5"),
        ({"model_type": "gemma3", "text_config": {"model_type": "bert"}}, "model_type is 'bert'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: only mxfp4"),
        ({"model_type": "gpt_oss", "swiglu_limit": 0}, "swiglu_limit is 0"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling: rope_type is 'longrope'"),
        ({"model_type": "qwen3_next"}, "layer_types has no layer with attention"),
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
