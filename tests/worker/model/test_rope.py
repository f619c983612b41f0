"""Frequencies and rotation against the formulas, and the spellings of config.json."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from worker.model.rope import Llama3Scaling, Rope, inverse_frequencies, read_rope, rotation_of

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, Rope(16, 10_000.0)),
        ({"rope_theta": 500_000}, Rope(16, 500_000.0)),
        ({"rope_theta": 5.0, "rope_scaling": None}, Rope(16, 5.0)),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, Rope(16, 7.0)),
        # As in transformers, a theta inside goes before one outside, rope_scaling before both.
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, Rope(16, 7.0)),
        (
            {"rope_theta": 5.0, "rope_scaling": {"rope_type": "default", "rope_theta": 7.0}},
            Rope(16, 7.0),
        ),
        (
            {
                "rope_theta": 5.0,
                "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            Rope(16, 5.0, 4.0),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, Rope(16, 10_000.0, 4.0)),
        (
            {"rope_theta": 9.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            Rope(16, 9.0, 2.0),
        ),
        (
            {"rope_theta": 9.0, "rope_scaling": LLAMA3},
            Rope(16, 9.0, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
        # One outside goes before one inside, as transformers does.
        (
            {"rope_theta": 9.0, "rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
            Rope(16, 9.0, Llama3Scaling(8.0, 1.0, 4.0, 32)),
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 9.0}},
            Rope(16, 9.0, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
    ],
)
def test_both_spellings_are_read(config: dict[str, Any], want: Rope) -> None:
    assert read_rope(config, 16, 1024) == want


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {**YARN, "beta_fast": 1.0}}, "beta_fast"),
        ({"rope_scaling": {**YARN, "truncate": 0}}, "truncate is 0"),
        ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, "attention_factor"),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": -1.0}}, "mscale_all_dim"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "layer types"),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_rope(config, 16, 1024)


def test_plain_and_linear_frequencies() -> None:
    plain = inverse_frequencies(Rope(8, 100.0), CPU)
    want = [100.0 ** (-i / 8) for i in (0, 2, 4, 6)]
    assert plain.tolist() == pytest.approx(want)
    assert torch.equal(inverse_frequencies(Rope(8, 100.0, 4.0), CPU), plain / 4)


def test_llama3_keeps_high_divides_low_and_blends_between() -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    plain = inverse_frequencies(Rope(32, 10_000.0), CPU)
    scaled = inverse_frequencies(Rope(32, 10_000.0, scaling), CPU)
    kinds = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 64 / 4:
            kinds.add("kept")
            assert after == pytest.approx(before)
        elif wavelength > 64:
            kinds.add("divided")
            assert after == pytest.approx(before / 8)
        else:
            kinds.add("blended")
            assert before / 8 < after < before
    assert kinds == {"kept", "divided", "blended"}


YARNS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "of gpt-oss": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "no wider than a step": {"beta_fast": 1.01, "beta_slow": 1.0, "truncate": True},
    "a factor of its own": {"attention_factor": 1.25},
    "two weights": {"mscale": 0.7, "mscale_all_dim": 1.3},
    "one weight, which counts for nothing": {"mscale": 0.7},
    "shorter than before": {"factor": 0.5},
    "kept and divided where no frequency is": {"beta_fast": 64.0, "beta_slow": 1e-6},
}


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations are not our subject
@pytest.mark.parametrize("name", YARNS)
def test_yarn_is_that_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = {"rope_theta": 150_000.0, "rope_scaling": {**YARN, **YARNS[name]}}
    theirs = LlamaConfig(**copy.deepcopy(config), hidden_size=128, num_attention_heads=2)
    want, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, CPU)
    rope = read_rope(config, 64, 1024)
    torch.testing.assert_close(inverse_frequencies(rope, CPU), want, rtol=1e-6, atol=0)
    assert rope.score_factor == pytest.approx(factor**2)


def test_only_yarn_changes_scores() -> None:
    assert Rope(16, 9.0, Llama3Scaling(8.0, 1.0, 4.0, 64)).score_factor == 1.0


def test_angles_are_positions_times_frequencies() -> None:
    positions = torch.tensor([0, 1, 700], dtype=torch.int32)
    frequencies = inverse_frequencies(Rope(8, 10_000.0), CPU)
    angles = positions.double()[:, None] * frequencies.double()
    want = torch.stack((angles.cos(), angles.sin()), dim=1).float()
    torch.testing.assert_close(rotation_of(positions, frequencies), want, rtol=1e-4, atol=1e-4)


def test_of_a_rope_of_a_part_the_rest_are_pairs_that_stay() -> None:
    rope = Rope(4, 100.0, num_still=6)
    assert rope.order == [0, 1, 4, 5, 6, 2, 3, 7, 8, 9]
    assert Rope(6, 100.0).order == [*range(6)]
    frequencies = inverse_frequencies(rope, CPU)
    assert frequencies.tolist() == [*inverse_frequencies(Rope(4, 100.0), CPU).tolist(), 0, 0, 0]
