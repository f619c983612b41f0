"""Commands arrive at the followers as the leader sent them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from kernels import PagedBatch
from kernels.contract import Run
from tests.worker.compute.processes import Processes
from worker.compute.ranks import Ranks
from worker.executor.torch import Step
from worker.parallel.commands import Order, Verb, receive, send, send_step


def ints(draw: random.Random, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    numbers = [draw.randrange(-(2**31), 2**31) for _ in range(count)]
    return torch.tensor(numbers, dtype=torch.int32).view(shape)


def step_of(seed: int) -> Step:
    """Return a step of any sizes: orders do not look at what is in the arrays."""
    draw = random.Random(seed)
    num_tokens, num_sequences, num_rows = draw.randint(1, 40), draw.randint(1, 9), seed % 4
    batch = PagedBatch(
        ints(draw, num_tokens),
        ints(draw, num_sequences + 1),
        ints(draw, num_sequences),
        ints(draw, num_sequences, draw.randint(1, 7)),
    )
    token_ids, positions, rows = (ints(draw, it) for it in (num_tokens, num_tokens, num_rows))
    runs = [Run(it, it + 3, draw.choice([None, 0, 7]), it + 1) for it in range(seed % 3)]
    slots, tables = batch.slots + 5, batch.block_tables + 5
    windowed = replace(batch, slots=slots, block_tables=tables) if seed % 2 else None
    return Step(token_ids, positions, rows, batch, draw.randint(1, 9), runs, windowed)


def described(order: Order) -> Any:
    if order.step is None:
        return order.verb, order.numbers
    token_ids, positions, rows, whole, microbatches, runs, windowed = order.step
    arrays = [token_ids, positions, rows]
    for batch in (whole,) if windowed is None else (whole, windowed):
        arrays += [batch.slots, batch.query_starts, batch.context_lens, batch.block_tables]
    return order.verb, [it.tolist() for it in arrays], microbatches, [*runs]


SEEDS = range(12)


def exchange(ranks: Ranks) -> list[Any]:
    if not ranks.is_leader:
        return [described(receive(ranks)) for _ in range(len(SEEDS) + 2)]
    send(ranks, Verb.ALLOCATE, 7, 16)
    for seed in SEEDS:
        send_step(ranks, step_of(seed))
    send(ranks, Verb.END)
    return []


def test_all_hear_what_the_leader_tells_in_its_order(processes: Processes) -> None:
    steps = [described(Order(Verb.STEP, step=step_of(seed))) for seed in SEEDS]
    _, *heard = processes.run(2, 2, exchange)
    for (allocate, numbers), *orders, (end, _) in heard:
        assert (allocate, numbers[:2], end) == (Verb.ALLOCATE, (7, 16), Verb.END)
        assert orders == steps
