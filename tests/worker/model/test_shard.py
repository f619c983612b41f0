"""Shards together are the model, once; a model that cannot be divided says by what it can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.models.make_model import make_model
from wire.process.model import SINGLE, ModelError
from worker.model.config import LayerConfig, ModelConfig, read_config
from worker.model.families import Experts
from worker.model.loader import load_weights
from worker.model.rope import Rope
from worker.model.shard import WHOLE, Cut, Shard

ROPE = Rope(16, 10_000.0)
CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return read_config(make_model(tmp_path, num_hidden_layers=5, vocab_size=250))


def test_the_leader_has_the_head() -> None:
    for number in range(6):
        shard = Shard.of_process(number, 2, 3)
        assert shard.process == number
        assert (shard.rank, shard.stage) == (number % 2, 2 - number // 2)
        assert shard.is_last == (number < 2) and shard.is_first == (number >= 4)
    assert Shard.of_process(0, 1, 1) == WHOLE and WHOLE.is_whole and WHOLE.is_first


def test_stages_have_all_layers_and_the_last_the_fewest() -> None:
    stages = [Shard(stage=it, stages=3).layers(7) for it in range(3)]
    assert stages == [range(3), range(3, 5), range(5, 7)]


def test_a_shard_is_a_smaller_model(config: ModelConfig) -> None:
    part = Shard(rank=1, size=2, stage=1, stages=2).of(config)
    assert part == replace(
        config, layers=config.layers[3:], num_heads=2, num_kv_heads=1, intermediate_size=64
    )
    assert Shard(size=4).of(config).num_kv_heads == 1
    assert WHOLE.of(config) == config


def test_fewer_kv_heads_than_shards_are_repeated(config: ModelConfig) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    cuts = [Shard(rank, 4).cut(config, name) for rank in range(4)]
    assert cuts == [Cut(-2, range(start, start + 16), 32) for start in (0, 0, 16, 16)]


def test_each_expert_is_divided_and_what_chooses_them_is_whole(tmp_path: Path) -> None:
    config = read_config(make_model(tmp_path, family="qwen3_moe", mlp_only_layers=[1]))
    shard = Shard(1, 2)
    experts = shard.of(config).layers[0].experts
    assert experts is not None and (experts.num_experts, experts.intermediate_size) == (8, 16)
    prefix = "model.layers.0.mlp."
    assert shard.cut(config, f"{prefix}gate.weight") is None
    assert shard.cut(config, f"{prefix}experts.3.up_proj.weight") == Cut(-2, range(16, 32), 32)
    assert shard.cut(config, f"{prefix}experts.3.down_proj.weight") == Cut(-1, range(16, 32), 32)
    dense = shard.cut(config, "model.layers.1.mlp.down_proj.weight")
    assert dense == Cut(-1, range(64, 128), 128)


def test_experts_in_one_are_divided_and_their_bias_is_added_once(tmp_path: Path) -> None:
    config = read_config(make_model(tmp_path, family="gpt_oss"))
    prefix = "model.layers.1.mlp.experts."
    cuts = {
        "gate_up_proj": Cut(-1, range(96, 192), 192),
        "gate_up_proj_bias": Cut(-1, range(96, 192), 192),
        "down_proj": Cut(-2, range(48, 96), 96),
        "down_proj_bias": Cut(-1, range(0), 64),
    }
    assert {it: Shard(1, 2).cut(config, prefix + it) for it in cuts} == cuts
    assert Shard(0, 2).cut(config, f"{prefix}down_proj_bias") == Cut(-1, range(64), 64)
    assert Shard(1, 2).cut(config, "model.layers.1.mlp.router.bias") is None
    assert Shard(1, 2).cut(config, "model.layers.1.self_attn.sinks") == Cut(-1, range(2, 4), 4)


def test_heads_of_a_delta_net_are_divided_with_what_their_convolution_sees(tmp_path: Path) -> None:
    """Two heads of keys of 8, each with two of values of 12: shard 1 has the second."""
    config = read_config(make_model(tmp_path, family="qwen3_next"))
    prefix = "model.layers.0.linear_attn."
    cuts = {
        "in_proj_qkvz.weight": Cut(-2, range(64, 128), 128),
        "in_proj_ba.weight": Cut(-2, range(4, 8), 8),
        "conv1d.weight": Cut(-3, range(8, 16), 80, (range(24, 32), range(56, 80))),
        "A_log": Cut(-1, range(2, 4), 4),
        "dt_bias": Cut(-1, range(2, 4), 4),
        "out_proj.weight": Cut(-1, range(24, 48), 48),
    }
    assert {it: Shard(1, 2).cut(config, prefix + it) for it in cuts} == cuts
    assert Shard(1, 2).cut(config, f"{prefix}norm.weight") is None
    of_layer = ((index, layer.experts) for index, layer in enumerate(config.layers))
    index, experts = next((index, it) for index, it in of_layer if it is not None)
    shared = Shard(1, 2).cut(config, f"model.layers.{index}.mlp.shared_expert.up_proj.weight")
    assert shared is not None and shared.length == experts.shared_size
    gated = next(it for it, layer in enumerate(config.layers) if layer.delta is None)
    query = Shard(1, 2).cut(config, f"model.layers.{gated}.self_attn.q_proj.weight")
    assert query == Cut(-2, range(64, 128), 128)
    with pytest.raises(ModelError, match="linear_num_key_heads is 2, no multiple of 4"):
        Shard(size=4).of(config)


def test_rows_beyond_the_vocabulary_are_padded(config: ModelConfig) -> None:
    kept = [Shard(rank, 4).tokens(250) for rank in range(4)]
    assert kept == [range(63), range(63, 126), range(126, 189), range(189, 250)]
    assert Shard(3, 4).tokens(2) == range(2, 2) and Shard(3, 4).num_rows(250) == 63
    cut = Shard(3, 4).cut(config, "lm_head.weight")
    assert cut == Cut(-2, range(189, 250), 250)


@pytest.mark.parametrize(
    ("family", "keys"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3_moe", {})],
)
def test_every_number_of_a_checkpoint_is_in_one_place(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    path = make_model(tmp_path, family=family, vocab_size=255, num_hidden_layers=3, **keys)
    held, config = load_file(path / SINGLE), read_config(path)
    found = {name: torch.zeros_like(it) for name, it in held.items()}
    for number in range(4):
        shard = Shard.of_process(number, 2, 2)
        for name, tensor in load_weights(path, None, CPU, shard=shard).named_tensors().items():
            cut = shard.cut(config, name)
            if cut is None:
                found[name] = tensor
                continue
            dim, kept, _, _ = cut
            own = tensor.narrow(dim, 0, len(kept))
            assert tensor.sum() == own.sum()  # what is beyond is zero
            found[name].narrow(dim, kept.start, len(kept)).copy_(own)
    assert all(torch.equal(found[name], held[name]) for name in held)


def test_a_tied_head_is_with_the_last_stage_and_the_embedding_with_the_first(
    tmp_path: Path,
) -> None:
    path = make_model(tmp_path, num_hidden_layers=3, tie_word_embeddings=True)
    embed = load_file(path / SINGLE)["model.embed_tokens.weight"]
    stages = [load_weights(path, None, CPU, shard=Shard(stage=it, stages=3)) for it in range(3)]
    assert torch.equal(stages[0].embed, embed) and torch.equal(stages[2].head, embed)
    assert [len(it.embed) + len(it.head) for it in stages] == [256, 0, 256]


def test_a_tensor_of_another_length_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    held = load_file(path / SINGLE)
    save_file(held | {name: torch.ones(64, 130)}, path / SINGLE)
    with pytest.raises(ModelError, match=r"down_proj\.weight is \(64, 130\).* 128 in dimension 1"):
        load_weights(path, None, CPU, shard=Shard(size=2))


def test_an_unknown_tensor_is_named_whosever_layer_it_is_in(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    save_file(load_file(path / SINGLE) | {"model.layers.2.x": torch.ones(1)}, path / SINGLE)
    with pytest.raises(ModelError, match=r"unknown .*layers\.2\.x"):
        load_weights(path, None, CPU, shard=Shard(stage=1, stages=2))


@pytest.mark.parametrize(
    ("change", "shard", "problem"),
    [
        ({}, Shard(size=3), "num_attention_heads is 4, no multiple of 3 .* may be 1, 2, 4 for"),
        (
            {"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 132},
            Shard(size=2),
            "num_key_value_heads is 3, neither a multiple .* may be 1, 3, 6, 12 for",
        ),
        ({"intermediate_size": 129}, Shard(size=2), "intermediate_size is 129, .* may be 1 for"),
        (
            {"layers": (LayerConfig(None, ROPE, Experts(8, 2, 33, is_normalized=True)),)},
            Shard(size=2),
            "intermediate_size of experts is 33, .* may be 1 for",
        ),
        ({}, Shard(stages=6), "num_hidden_layers is 5, too few .* may be 1 to 5 for"),
    ],
)
def test_a_model_that_does_not_divide_says_what_would(
    config: ModelConfig, change: dict[str, Any], shard: Shard, problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        shard.of(replace(config, **change))


def test_each_stage_of_a_model_of_states_has_attention(tmp_path: Path) -> None:
    config = read_config(make_model(tmp_path, family="qwen3_next"))
    assert [layer.delta is None for layer in config.layers] == [False, True, False, True]
    assert Shard(stages=2).of(config).num_layers == 2
    with pytest.raises(ModelError, match="4 leaves a stage without attention; lower it"):
        Shard(stages=4).of(config)
