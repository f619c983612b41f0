"""Inputs of a step arrive at their place, wherever they are each time."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.inputs import StepInputs
from kernels.cpu.program import Program
from worker.model.rope import Rope, inverse_frequencies, rotation_of

FREQUENCIES = torch.stack(
    [
        inverse_frequencies(Rope(head_dim=32, theta=theta), torch.device("cpu"))
        for theta in (10_000.0, 500_000.0)
    ]
)


def ints(low: int, high: int, count: int) -> torch.Tensor:
    return torch.randint(low, high, (count,), dtype=torch.int32)


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (5, 0), (7, 3), (300, 300)])
def test_an_operation_made_once_follows_what_is_set(num_tokens: int, num_rows: int) -> None:
    inputs = StepInputs(301, FREQUENCIES)
    program = Program([inputs.load(num_tokens, num_rows)])
    for _ in range(3):
        token_ids, slots = ints(0, 50_000, num_tokens), ints(0, 10_000, num_tokens)
        positions, rows = ints(0, 130_000, num_tokens), ints(0, num_tokens, num_rows)
        inputs.set(token_ids, positions, slots, rows)
        program.run()
        assert torch.equal(inputs.token_ids[:num_tokens], token_ids)
        assert torch.equal(inputs.slots[:num_tokens], slots)
        assert torch.equal(inputs.rows[:num_rows], rows)
        for found, frequencies in zip(inputs.rotations, FREQUENCIES, strict=True):
            rotation = rotation_of(positions, frequencies)
            torch.testing.assert_close(found[:num_tokens], rotation, rtol=0, atol=2e-7)


def test_what_was_set_lives_until_it_was_taken() -> None:
    inputs = StepInputs(4, FREQUENCIES)
    program = Program([inputs.load(4, 1)])
    inputs.set(*(torch.full((4,), value, dtype=torch.int32) for value in (7, 5, 6, 2)))
    torch.zeros(4, dtype=torch.int32)  # where they lay, had nobody kept them
    program.run()
    assert inputs.token_ids.tolist() == [7] * 4
    assert (inputs.slots.tolist(), inputs.rows[:1].tolist()) == ([6] * 4, [2])
