"""Every byte and every scale of the format, and what does not fit."""

from __future__ import annotations

import math

import pytest
import torch

from worker.model.mxfp4 import BLOCK_BYTES, widen_into


def value_of(half: int) -> float:
    """Return what four bits say: sign, two of exponent (biased by 1), one of mantissa."""
    sign, exponent, mantissa = half >> 3, half >> 1 & 3, half & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def test_every_byte_is_two_numbers_the_low_half_first() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 2, 4, BLOCK_BYTES)
    scales = torch.tensor([127, 128, 120, 140], dtype=torch.uint8).expand(2, 2, 4)
    target = torch.empty(2, 2, 128)
    widen_into(target, blocks, scales)
    want = [
        value_of(half) * 2.0 ** (int(scales.flatten()[byte // BLOCK_BYTES]) - 127)
        for byte in range(256)
        for half in (byte & 15, byte >> 4)
    ]
    assert target.flatten().tolist() == want


def test_scales_are_powers_of_two_and_the_last_is_no_number() -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    ones = torch.full((1, 256, 1, BLOCK_BYTES), 0x22, dtype=torch.uint8)
    target = torch.empty(1, 256, 32)
    widen_into(target, ones, scales)
    assert target[0, :255, 0].tolist() == [2.0 ** (exponent - 127) for exponent in range(255)]
    assert math.isnan(float(target[0, 255, 0]))


def test_values_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(256, (2, 6, 3, BLOCK_BYTES), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 150, (2, 6, 3), generator=generator).to(torch.uint8)
    target = torch.empty(2, 6, 96, dtype=torch.bfloat16)
    widen_into(target, blocks, scales)
    assert torch.equal(convert_moe_packed_tensors(blocks, scales), target.transpose(1, 2))


def test_the_target_may_lie_turned_over_and_in_16_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 8, 2, BLOCK_BYTES), generator=generator).to(torch.uint8)
    scales = torch.randint(120, 130, (3, 8, 2), generator=generator).to(torch.uint8)
    plain, turned = torch.empty(3, 8, 64), torch.empty(3, 64, 8, dtype=torch.bfloat16)
    widen_into(plain, blocks, scales)
    widen_into(turned.transpose(1, 2), blocks, scales)
    assert torch.equal(plain, turned.transpose(1, 2).float())


@pytest.mark.parametrize(
    ("blocks", "scales", "words"),
    [
        (
            torch.zeros(2, 4, 2, 15, dtype=torch.uint8),
            torch.zeros(2, 4, 2, dtype=torch.uint8),
            "15",
        ),
        (
            torch.zeros(2, 4, 2, 16),
            torch.zeros(2, 4, 2, dtype=torch.uint8),
            "_blocks are .*float32",
        ),
        (
            torch.zeros(2, 4, 2, 16, dtype=torch.uint8),
            torch.zeros(2, 4, 1, dtype=torch.uint8),
            r"_scales are torch.uint8 \[2, 4, 1\], not torch.uint8 \[2, 4, 2\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    blocks: torch.Tensor, scales: torch.Tensor, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        widen_into(torch.empty(2, 4, 64), blocks, scales)
