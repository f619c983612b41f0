"""What families say of layers, by the keys that each has for it."""

from __future__ import annotations

import copy
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
    on_no_layer,
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


def test_what_no_layer_has() -> None:
    assert on_no_layer({"sliding_window": 8, "num_experts": 8}, 3) == (None, None, None)


def test_one_window_for_all_layers() -> None:
    assert same_window({}, 2) == (4096, 4096)
    assert same_window({"sliding_window": 8}, 2) == (8, 8)
    assert same_window({"sliding_window": None}, 2) == (None, None)
    with pytest.raises(ModelError, match="sliding_window is 0"):
        same_window({"sliding_window": 0}, 2)


def test_windows_that_may_be_switched_off() -> None:
    def windows(**keys: Any) -> tuple[int | None, ...]:
        return windows_if_used(keys, 3)

    assert windows(sliding_window=8, max_window_layers=1) == (None,) * 3
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert windows(**on, max_window_layers=1) == (None, 8, 8)
    assert windows(**on, max_window_layers=0) == (8, 8, 8)
    assert windows(**on, max_window_layers=9) == (None,) * 3
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(**on, layer_types=types) == (8, None, 8)
    with pytest.raises(ModelError, match="use_sliding_window"):
        windows(layer_types=types)
    for wrong in (types[:2], ["full_attention", "mamba", "full_attention"], "full_attention"):
        with pytest.raises(ModelError, match="layer_types"):
            windows(**on, layer_types=wrong)


def test_one_rope_is_that_of_every_layer() -> None:
    ropes = one_rope({"rope_theta": 5.0}, 16, 1024)
    assert ropes.everywhere is ropes.windowed and ropes.windowed.theta == 5.0


def test_one_window_that_may_be_switched_off() -> None:
    assert same_window_if_used({"sliding_window": 8}, 2) == (None, None)
    assert same_window_if_used({"sliding_window": 8, "use_sliding_window": True}, 2) == (8, 8)


def test_layers_with_experts() -> None:
    assert sparse_layers({}, 2) == (Experts(128, 8, 768, is_normalized=False),) * 2
    keys: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    keys |= {"norm_topk_prob": True, "mlp_only_layers": None}
    some = Experts(4, 2, 16, is_normalized=True)
    for key in ("num_experts", "num_local_experts"):
        assert sparse_layers(keys | {key: 4}, 2) == (some, some)
        assert sparse_layers(keys | {key: 0}, 2) == (None, None)
    keys["num_experts"] = 4
    assert sparse_layers(keys | {"decoder_sparse_step": 2}, 4) == (None, some, None, some)
    chosen = {"decoder_sparse_step": 2, "mlp_only_layers": [3, 0]}
    assert sparse_layers(keys | chosen, 4) == (None, some, None, None)
    for wrong, message in (
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, more than the 4 experts"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers is"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    ):
        with pytest.raises(ModelError, match=message):
            sparse_layers(keys | wrong, 4)


def test_windows_by_turns() -> None:
    assert windows_by_turns({}, 3) == (128, None, 128)
    types = ["full_attention", "full_attention", "sliding_attention"]
    assert windows_by_turns({"sliding_window": 8, "layer_types": types}, 3) == (None, None, 8)


def test_layers_that_keep_a_state() -> None:
    heads = DeltaHeads(16, 2, 128, 128, 4)
    assert delta_between({}, 5) == (heads, heads, heads, None, heads)
    assert delta_between({"full_attention_interval": 2}, 3) == (heads, None, heads)
    types = ["full_attention", "linear_attention"]
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 3,
    }
    small = DeltaHeads(2, 3, 8, 5, 3)
    assert delta_between(sizes | {"layer_types": types}, 2) == (None, small)
    assert (small.channels, small.state_size) == (31, 31 * 2 + 3 * 8 * 5)
    for keys, words in (
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5, no multiple"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must name"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'"),
    ):
        with pytest.raises(ModelError, match=words):
            delta_between(sizes | keys, 2)


def test_experts_with_one_that_all_tokens_go_to() -> None:
    usual = Experts(512, 10, 512, is_normalized=True, shared_size=512)
    assert sparse_layers_with_shared({}, 2) == (usual, usual)
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    own = Experts(4, 2, 8, is_normalized=False, shared_size=24)
    keys |= {"norm_topk_prob": False, "shared_expert_intermediate_size": 24}
    assert sparse_layers_with_shared(keys | {"mlp_only_layers": [1]}, 3) == (own, None, own)
    assert sparse_layers_with_shared(keys | {"decoder_sparse_step": 2}, 3) == (None, own, None)
    assert sparse_layers_with_shared({"num_experts": 0}, 2) == (None, None)


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


def test_experts_that_a_checkpoint_has_in_one() -> None:
    def experts(num: int, top_k: int, size: int) -> Experts:
        return Experts(num, top_k, size, is_normalized=True, has_bias=True, is_stacked=True)

    keys = {"intermediate_size": 96}
    assert stacked_experts(keys, 2) == (experts(128, 4, 96),) * 2
    keys |= {"num_local_experts": 6, "num_experts_per_tok": 6}
    assert stacked_experts(keys, 1) == (experts(6, 6, 96),)
    with pytest.raises(ModelError, match="num_experts_per_tok is 7, more than the 6 experts"):
        stacked_experts(keys | {"num_experts_per_tok": 7}, 1)
    with pytest.raises(ModelError, match="num_local_experts is 0"):
        stacked_experts(keys | {"num_local_experts": 0}, 1)


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


def test_windows_between_layers_that_see_all() -> None:
    assert windows_between({}, 8) == (4096,) * 5 + (None,) + (4096,) * 2
    keys: dict[str, Any] = {"sliding_window": 8, "sliding_window_pattern": 2}
    assert windows_between(keys, 3) == (8, None, 8)
    types = ["full_attention", "full_attention", "sliding_attention"]
    assert windows_between(keys | {"layer_types": types}, 3) == (None, None, 8)
    with pytest.raises(ModelError, match="sliding_attention without sliding_window"):
        windows_between({"sliding_window": None, "layer_types": types}, 3)


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
