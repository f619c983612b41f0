"""The gated delta rule: token by token in float64 it says the same, however tokens are cut."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import conv1d, normalize, silu

from kernels.contract import Run
from kernels.delta_rule import PART, convolve, delta_rule, plan_runs

HEADS, PER_KEY, KEY, VALUE, WIDTH, SLOTS = 2, 3, 8, 5, 4, 12


class Tokens(NamedTuple):
    """Inputs of some tokens: [T, H, ...]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(*(it[start:stop] for it in self))


def tokens_of(count: int, seed: int = 0) -> Tokens:
    draw = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, count, HEADS, KEY, generator=draw)
    value = torch.randn(count, HEADS, PER_KEY, VALUE, generator=draw)
    decay = torch.randn(count, HEADS, PER_KEY, generator=draw).abs()
    decay[::7] *= 30  # some tokens make a head forget nearly everything
    beta = torch.rand(count, HEADS, PER_KEY, generator=draw)
    return Tokens(query, normalize(key, dim=-1), value, -decay, beta)


def one_by_one(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The result for each token, and the final matrices, by the definition."""
    matrix = torch.zeros(HEADS, PER_KEY, KEY, VALUE, dtype=torch.float64)
    found = []
    for query, key, value, decay, beta in zip(*(it.double() for it in tokens), strict=True):
        matrix = matrix * decay.exp()[..., None, None]
        known = torch.einsum("hk,hrkv->hrv", key, matrix)
        matrix = matrix + torch.einsum("hk,hr,hrv->hrkv", key, beta, value - known)
        found.append(torch.einsum("hk,hrkv->hrv", query, matrix))
    return torch.stack(found), matrix


def pool_of() -> torch.Tensor:
    """Slots that hold no numbers, of which nothing may be read before it was written."""
    return torch.full((SLOTS, 1, HEADS, PER_KEY * KEY * VALUE), torch.nan)


def matrices(pool: torch.Tensor) -> torch.Tensor:
    return pool[:, 0].view(SLOTS, HEADS, PER_KEY, KEY, VALUE)


@pytest.mark.parametrize("count", [1, 2, PART - 1, PART, PART + 1, 3 * PART + 5])
def test_a_run_is_what_its_tokens_are_one_by_one(count: int) -> None:
    tokens, pool = tokens_of(count), pool_of()
    found = delta_rule(*tokens, matrices(pool), plan_runs(pool, [Run(0, count, None, 7)]))
    wanted, matrix = one_by_one(tokens)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(matrices(pool)[7].double(), matrix, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [(40,), (1, 40), (39, 40), (1, 2, 3, 40), tuple(range(1, 41))])
def test_sequences_go_on_side_by_side_from_slot_to_slot(cuts: tuple[int, ...]) -> None:
    """Two sequences, one of which is cut: each step has a run of both, and perhaps a third."""
    pool = pool_of()
    ours, other = tokens_of(40, 1), tokens_of(40, 2)
    before: tuple[int | None, int | None] = (None, None)
    found, others, start = [], [], 0
    for number, cut in enumerate(cuts):
        after = (2 * (number % 2), 2 * (number % 2) + 1)
        parts = zip(ours.part(start, cut), other.part(start, cut), strict=True)
        both = Tokens(*map(torch.cat, parts))
        count = cut - start
        runs = [Run(0, count, before[0], after[0]), Run(count, 2 * count, before[1], after[1])]
        out = delta_rule(*both, matrices(pool), plan_runs(pool, runs))
        found.append(out[:count])
        others.append(out[count:])
        before, start = after, cut
    for tokens, made in ((ours, found), (other, others)):
        wanted, _ = one_by_one(tokens)
        torch.testing.assert_close(torch.cat(made).double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 2, 19])
def test_a_sequence_may_have_two_runs_in_a_step(cut: int) -> None:
    """The state between them is kept in a slot of its own, and a stranger comes in between."""
    tokens, stranger, pool = tokens_of(20, 3), tokens_of(1, 4), pool_of()
    runs = [Run(0, cut, None, 3), Run(cut, 20, 3, 6), Run(20, 21, None, 0)]
    rows = Tokens(*map(torch.cat, zip(tokens, stranger, strict=True)))
    states = plan_runs(pool, runs)
    assert len(states.singles.rows) == 1, "what comes alone is computed beside the rest"
    found = delta_rule(*rows, matrices(pool), states)
    wanted, last = one_by_one(tokens)
    torch.testing.assert_close(found[:20].double(), wanted, rtol=1e-4, atol=1e-5)
    _, between = one_by_one(tokens.part(0, cut))
    torch.testing.assert_close(matrices(pool)[3].double(), between, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(matrices(pool)[6].double(), last, rtol=1e-4, atol=1e-5)
    assert matrices(pool)[[1, 2, 4, 5]].isnan().all(), "nobody writes to the slots of others"


@pytest.mark.parametrize("cuts", [(9,), (1, 9), (2, 3, 9), tuple(range(1, 10))])
@pytest.mark.parametrize("width", [2, WIDTH])
def test_a_convolution_sees_the_tokens_before(width: int, cuts: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(5)
    channels = 6
    x = torch.randn(9, HEADS, channels, generator=draw)
    weight = torch.randn(HEADS, channels, width, generator=draw)
    pool = torch.full((SLOTS, 1, HEADS, channels * (width - 1)), torch.nan)
    memory = pool[:, 0].view(SLOTS, HEADS, channels, width - 1)
    made, start, before = [], 0, None
    for number, cut in enumerate(cuts):
        states = plan_runs(pool, [Run(0, cut - start, before, number)])
        made.append(convolve(x[start:cut], weight, memory, states))
        start, before = cut, number
    wanted = silu(
        conv1d(
            x.flatten(1).T[None],
            weight.flatten(0, 1)[:, None],
            padding=width - 1,
            groups=HEADS * channels,
        )[0, :, :9]
    )
    torch.testing.assert_close(torch.cat(made).flatten(1), wanted.T, rtol=1e-5, atol=1e-6)
