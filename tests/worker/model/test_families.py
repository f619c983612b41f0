"""The layers of each family, by the keys of its config.json."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from scripts.models.make_model import ARCHITECTURES
from wire.process import model
from wire.process.model import ModelError
from worker.model.families import (
    FAMILIES,
    DeltaHeads,
    Experts,
    delta_between,
    one_rope,
    one_rope_of_a_part,
    one_rope_or_yarn,
    ropes_by_type,
    same_window,
    same_window_if_used,
    sparse_layers,
    sparse_layers_with_shared,
    stacked_experts,
    windows_between,
    windows_by_turns,
    windows_if_used,
)
from worker.model.rope import Rope

FULL, SLIDING = "full_attention", "sliding_attention"
ON = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("windows", "keys", "expected"),
    [
        (same_window, {}, (4096, 4096)),
        (same_window, {"sliding_window": 8}, (8, 8)),
        (same_window, {"sliding_window": None}, (None, None)),
        (same_window_if_used, {"sliding_window": 8}, (None, None)),
        (same_window_if_used, ON, (8, 8)),
        (windows_if_used, {"sliding_window": 8, "max_window_layers": 1}, (None,) * 3),
        (windows_if_used, {**ON, "max_window_layers": 1}, (None, 8, 8)),
        (windows_if_used, {**ON, "max_window_layers": 0}, (8, 8, 8)),
        (windows_if_used, ON, (None,) * 3),
        (windows_if_used, {**ON, "layer_types": [SLIDING, FULL, SLIDING]}, (8, None, 8)),
        (windows_by_turns, {}, (128, None, 128)),
        (windows_by_turns, {"sliding_window": 8, "layer_types": [FULL, SLIDING]}, (None, 8)),
        (windows_between, {}, (4096,) * 5 + (None,) + (4096,) * 2),
        (windows_between, {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None, 8)),
        (windows_between, {"sliding_window": 8, "layer_types": [FULL, SLIDING]}, (None, 8)),
    ],
)
def test_windows_of_layers(windows: Any, keys: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert windows(keys, len(expected)) == expected


KEYS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FOUR = Experts(4, 2, 16, is_normalized=True)
SHARED = Experts(4, 2, 16, is_normalized=False, shared_size=24)
SHARING = {**KEYS, "num_experts": 4, "shared_expert_intermediate_size": 24, "norm_topk_prob": False}
STACKED = Experts(6, 6, 96, is_normalized=True, has_bias=True, is_stacked=True)
STACKING = {"intermediate_size": 96, "num_local_experts": 6, "num_experts_per_tok": 6}
SPARSE = {**KEYS, "norm_topk_prob": True, "num_experts": 4}


@pytest.mark.parametrize(
    ("experts", "keys", "expected"),
    [
        (sparse_layers, {}, (Experts(128, 8, 768, is_normalized=False),) * 2),
        (sparse_layers, {**SPARSE, "mlp_only_layers": None}, (FOUR, FOUR)),
        (sparse_layers, {**SPARSE, "num_experts": None, "num_local_experts": 4}, (FOUR, FOUR)),
        (sparse_layers, {"num_experts": 0}, (None, None)),
        (sparse_layers, {**SPARSE, "decoder_sparse_step": 2}, (None, FOUR, None, FOUR)),
        (
            sparse_layers,
            {**SPARSE, "decoder_sparse_step": 2, "mlp_only_layers": [3, 0]},
            (None, FOUR, None, None),
        ),
        (
            sparse_layers_with_shared,
            {},
            (Experts(512, 10, 512, is_normalized=True, shared_size=512),),
        ),
        (sparse_layers_with_shared, {**SHARING, "mlp_only_layers": [1]}, (SHARED, None, SHARED)),
        (sparse_layers_with_shared, {"num_experts": 0}, (None, None)),
        (
            stacked_experts,
            {"intermediate_size": 96},
            (replace(STACKED, num_experts=128, top_k=4),) * 2,
        ),
        (stacked_experts, STACKING, (STACKED,)),
    ],
)
def test_experts_of_layers(experts: Any, keys: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert experts(keys, len(expected)) == expected


DELTA = DeltaHeads(16, 2, 128, 128, 4)
SMALL = DeltaHeads(2, 3, 8, 5, 3)
SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}


def test_layers_that_keep_a_state() -> None:
    assert delta_between({}, 5) == (DELTA, DELTA, DELTA, None, DELTA)
    assert delta_between({"full_attention_interval": 2}, 3) == (DELTA, None, DELTA)
    types = [FULL, "linear_attention"]
    assert delta_between(SIZES | {"layer_types": types}, 2) == (None, SMALL)
    assert (SMALL.channels, SMALL.state_size) == (31, 31 * 2 + 3 * 8 * 5)


@pytest.mark.parametrize(
    ("reader", "keys", "words"),
    [
        (same_window, {"sliding_window": 0}, "sliding_window is 0"),
        (windows_if_used, {"layer_types": [SLIDING, FULL]}, "use_sliding_window"),
        (windows_if_used, {**ON, "layer_types": [FULL]}, "layer_types must name"),
        (windows_if_used, {**ON, "layer_types": [FULL, "mamba"]}, "layer_types must name"),
        (windows_if_used, {**ON, "layer_types": FULL}, "layer_types must name"),
        (
            windows_between,
            {"sliding_window": None, "layer_types": [FULL, SLIDING]},
            "sliding_attention without sliding_window",
        ),
        (sparse_layers, {**SPARSE, "num_experts_per_tok": 5}, "tok is 5, more than the 4 experts"),
        (sparse_layers, {**SPARSE, "mlp_only_layers": 3}, "mlp_only_layers is 3"),
        (sparse_layers, {**SPARSE, "mlp_only_layers": [True]}, "mlp_only_layers is"),
        (sparse_layers, {**SPARSE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (sparse_layers, {**SPARSE, "norm_topk_prob": 1}, "norm_topk_prob is 1"),
        (stacked_experts, {**STACKING, "num_experts_per_tok": 7}, "is 7, more than the 6 experts"),
        (stacked_experts, {**STACKING, "num_local_experts": 0}, "num_local_experts is 0"),
        (delta_between, {**SIZES, "linear_num_value_heads": 5}, "value_heads is 5, no multiple"),
        (delta_between, {**SIZES, "linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        (delta_between, {"layer_types": [FULL, SLIDING]}, "layer_types must name"),
        (delta_between, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'"),
    ],
)
def test_wrong_keys_are_named(reader: Any, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        reader(keys, 2)


def test_a_rope_of_a_part_of_each_head() -> None:
    def rope(**keys: Any) -> Rope:
        ropes = one_rope_of_a_part(keys, 16, 64)
        assert ropes.everywhere == ropes.windowed
        return ropes.everywhere

    assert rope() == rope(partial_rotary_factor=None) == Rope(4, 10_000.0, num_still=12)
    assert rope(partial_rotary_factor=0.5, rope_theta=7.0) == Rope(8, 7.0, num_still=8)
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 9.0}
    nested = rope(rope_parameters=linear | {"partial_rotary_factor": 1.0})
    assert nested == Rope(16, 9.0, 4.0)
    for part in (0.05, 0.2, 1.5):
        with pytest.raises(ModelError, match=f"partial_rotary_factor is {part}"):
            rope(partial_rotary_factor=part)


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 7.0},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 7.0},
    ],
)
def test_a_rope_that_is_yarn_where_nothing_is_said(keys: dict[str, Any]) -> None:
    from transformers import GptOssConfig

    said = GptOssConfig(**copy.deepcopy(keys), max_position_embeddings=4096).rope_parameters
    want = one_rope({"rope_parameters": said}, 64, 4096)
    assert one_rope_or_yarn(keys, 64, 4096) == want


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
@pytest.mark.parametrize(
    ("keys", "everywhere", "windowed"),
    [
        ({}, Rope(16, 1e6), Rope(16, 1e4)),
        (
            {"rope_theta": 7.0, "rope_local_base_freq": 5.0, "rope_scaling": LINEAR},
            Rope(16, 7.0, 8.0),
            Rope(16, 5.0),
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 7.0, **LINEAR},
                    "sliding_attention": {"rope_theta": 5.0, "rope_type": "default"},
                }
            },
            Rope(16, 7.0, 8.0),
            Rope(16, 5.0),
        ),
        ({"rope_parameters": {"full_attention": LINEAR}}, Rope(16, 1e6, 8.0), Rope(16, 1e4)),
        (
            {
                "rope_scaling": LINEAR,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            Rope(16, 1e6, 8.0),
            Rope(16, 1e4),
        ),
    ],
)
def test_ropes_by_type(keys: dict[str, Any], everywhere: Rope, windowed: Rope) -> None:
    from transformers import Gemma3TextConfig

    found = ropes_by_type(keys, 16, 1024)
    assert found == (everywhere, windowed)
    theirs = Gemma3TextConfig(**copy.deepcopy(keys)).rope_parameters
    for rope, name in zip(found, ("full_attention", "sliding_attention"), strict=True):
        assert (rope.theta, rope.scaling) == (
            theirs[name]["rope_theta"],
            theirs[name].get("factor"),
        )


@pytest.mark.parametrize(
    "parameters",
    [{"rope_theta": 5.0}, {"full_attention": 5.0}, {"mamba": {"rope_theta": 5.0}}, [5.0]],
)
def test_ropes_of_no_type_are_refused(parameters: Any) -> None:
    with pytest.raises(ModelError, match="an object for each of full_attention"):
        ropes_by_type({"rope_parameters": parameters}, 16, 1024)


def test_of_every_family_a_random_checkpoint_can_be_made() -> None:
    """Those of more than text hold that of another family."""
    assert set(FAMILIES) - {"gemma3"} == set(ARCHITECTURES)


def test_the_families_are_those_that_a_router_lets_pass() -> None:
    assert tuple(FAMILIES) == model.FAMILIES
