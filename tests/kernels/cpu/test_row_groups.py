"""Rows in groups: each meets its own matrix of the stack, in the bits it has there alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.experts import Routes
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Program
from kernels.cpu.row_groups import Groups, coming_weights, first_weights, in_stack, next_units
from kernels.cpu.tasks import record_of
from kernels.cpu.threads import next_chunk
from tests.kernels.cpu.weights import KINDS, Weight, gated_room, inputs_of, times

# Rows of each of some experts: none, one, less than a tile, between one tile and two, more.
COUNTS = [3, 0, 1, 16, 33, 0, 40, 64, 2, 17, 0]
K, N = 80, 3 * 32


def routes_of(counts: list[int]) -> Routes:
    """Return routes by which so many rows meet each matrix, in order."""
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    routes = Routes(len(experts), len(counts), 1)
    logits = torch.nn.functional.one_hot(experts, len(counts)).float()
    Program(routes.choose(logits, is_normalized=True)).run()
    assert torch.equal(routes.experts[:, 0], experts.int())
    return routes


@pytest.mark.parametrize(("kind", "way"), KINDS)
@pytest.mark.parametrize("rows", [N, N - 7])
def test_a_group_has_the_bits_of_its_own_product(
    kind: type[Weight], way: Way | None, rows: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    stack = torch.randn(len(COUNTS), rows, K, generator=generator)
    routes, together = routes_of(COUNTS), kind(stack)
    x = inputs_of(kind, torch.randn(sum(COUNTS), K, generator=generator))
    before = torch.randn(len(x), together.num_columns, generator=generator)
    bias = torch.randn(len(COUNTS), rows, generator=generator)
    bias = pad(bias, (0, together.num_columns - rows)).contiguous()
    y = before.clone()
    Program([times(together, x, y, bias, way, routes.groups)]).run()
    start = 0
    for matrix, added, count in zip(stack, bias, COUNTS, strict=True):
        end, alone = start + count, kind(matrix)
        want = before[start:end].clone()
        Program([times(alone, x[start:end], want, added, way)]).run()
        assert torch.equal(y[start:end, :rows], want[:, :rows])
        start = end


@pytest.mark.parametrize(("kind", "way"), KINDS)
def test_rows_are_added_to_those_of_their_tokens_in_the_same_bits_alone(
    kind: type[Weight], way: Way | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    experts, tokens = len(COUNTS), 40
    together = kind(torch.randn(experts, N, K, generator=generator))
    bias = torch.randn(experts, N, generator=generator)
    logits = torch.randn(tokens, experts, generator=generator)
    rows = torch.randn(4 * tokens, K, generator=generator)
    before = torch.randn(tokens, N, generator=generator)

    def added(logits: torch.Tensor, rows: torch.Tensor, y: torch.Tensor) -> Groups:
        """Add to y what four experts a token make of rows, which are in the experts' order."""
        routes = Routes(len(logits), experts, 4)
        Program(routes.choose(logits, is_normalized=True)).run()
        x = inputs_of(kind, rows)
        Program(
            [times(together, x, y, bias, way, routes.groups, is_added=False, is_by_token=True)]
        ).run()
        return routes.groups

    y = before.clone()
    groups = added(logits, rows, y)
    made = torch.zeros(len(rows), N)
    Program([times(together, inputs_of(kind, rows), made, bias, way, groups)]).run()
    want = before.index_add(0, groups.tokens, groups.shares[:, None] * made)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    for token in range(tokens):
        alone = before[token : token + 1].clone()
        added(logits[token : token + 1], rows[groups.tokens == token], alone)
        assert torch.equal(alone[0], y[token])


@pytest.mark.parametrize(("kind", "way"), KINDS[1:])
def test_gates_of_a_group_are_those_of_its_own_product(
    kind: type[PairedWeight] | type[Int8Weight], way: Way | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    stack = torch.randn(len(COUNTS), N, K, generator=generator)
    bias = torch.randn(len(COUNTS), N, generator=generator)
    routes, together = routes_of(COUNTS), kind(stack, is_gated=True)
    x = inputs_of(kind, torch.randn(sum(COUNTS), K, generator=generator))
    y = gated_room(kind, len(x), N // 2)
    Program([together.times_gated(x, y, bias=bias, groups=routes.groups, way=way)]).run()
    start = 0
    for matrix, added, count in zip(stack, bias, COUNTS, strict=True):
        end, want = start + count, gated_room(kind, count, N // 2)
        alone = kind(matrix, is_gated=True)
        Program([alone.times_gated(x[start:end], want, bias=added, way=way)]).run()
        assert torch.equal(y[start:end], want)
        start = end


@given(
    st.integers(1, 20),
    st.integers(1, 70),
    st.integers(1, 9),
    st.lists(st.integers(0, 19), max_size=80),
)
def test_a_chunk_lies_within_one_matrix(
    num_threads: int, num_units: int, num_matrices: int, order: list[int]
) -> None:
    total, state = num_units * num_matrices, 0
    taken: list[int] = []
    for thread in [*order, *range(20), *[0] * total]:
        first, count = next_chunk(state, total, num_units, num_threads, thread % num_threads)
        if count:
            assert first // num_units == (first + count - 1) // num_units
            state += count * (1 << 32 if thread % num_threads % 2 else 1)
            taken += range(first, first + count)
    assert sorted(taken) == list(range(total))


def test_two_threads_begin_at_both_ends_of_a_matrix() -> None:
    assert first_weights(1000, 40, 2, 10) == (1000, 1000 + 32 * 10)


class Product(NamedTuple):
    """The arguments of a product that decide which weights a thread reads."""

    groups: int
    is_by_token: bool
    num_units: int = 40
    num_threads: int = 2
    weight: int = 1 << 20
    next_even: int = 1
    next_odd: int = 2
    taken: int = 0


@pytest.mark.parametrize("is_by_token", [False, True])
@pytest.mark.parametrize("thread", [0, 1])
def test_a_thread_asks_memory_for_the_weights_that_it_takes_next(
    thread: int, is_by_token: bool
) -> None:
    routes = routes_of(COUNTS)
    [product] = record_of(Product(routes.groups.address, is_by_token))
    group, unit, count = next_units(product, thread, 0, 0, 0)
    while count:
        coming = coming_weights(product, thread, group, unit, 64)
        group, unit, count = next_units(product, thread, group, unit, count)
        following = product["weight"] + in_stack(product, group, unit) * 64 if count else 1 + thread
        assert coming == following
