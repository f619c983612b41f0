"""Commands of the leader (process 0 of a model) to the other processes: broadcast int32 arrays.

A command is a header of `HEADER` numbers; for a step, these are the sizes of the arrays that
follow.  Followers do not validate commands, because they come from their own worker.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import torch

from kernels import PagedBatch
from kernels.contract import Run
from worker.compute.ranks import Ranks
from worker.executor.torch import Step

HEADER: Final = 8
_NONE: Final = -1  # a run at the beginning of its sequence has no state before it


class Verb(IntEnum):
    """Kinds of commands: `ALLOCATE` the KV cache, compute a `STEP`, or `END` the process."""

    ALLOCATE = 1
    STEP = 2
    END = 3


class Order(NamedTuple):
    """A command; `numbers` are the arguments of `Executor.allocate`, `step` is set for `STEP`."""

    verb: Verb
    numbers: tuple[int, ...] = ()
    step: Step | None = None


def send(ranks: Ranks, verb: Verb, *numbers: int) -> None:
    """Broadcast a command other than `STEP`."""
    ranks.broadcast(_header(verb, *numbers))


def send_step(ranks: Ranks, step: Step) -> None:
    tables = step.batch.block_tables
    ranks.broadcast(
        _header(
            *(Verb.STEP, len(step.token_ids), len(tables), tables.shape[1], len(step.rows)),
            *(step.num_microbatches, len(step.runs), step.windowed is not None),
        )
    )
    ranks.broadcast(torch.cat([it.flatten() for it in _arrays(step)]))


def receive(ranks: Ranks) -> Order:
    header = torch.empty(HEADER, dtype=torch.int32)
    ranks.broadcast(header)
    verb, *numbers = header.tolist()
    if verb != Verb.STEP:
        return Order(Verb(verb), tuple(numbers))
    num_tokens, num_sequences, num_columns, num_rows, num_microbatches, num_runs, has_windows = (
        numbers
    )
    sizes = [num_tokens, num_tokens, num_rows, num_tokens]
    sizes += [num_sequences + 1, num_sequences, num_sequences * num_columns, num_runs * 4]
    sizes += [num_tokens, num_sequences * num_columns] if has_windows else []
    arrays = torch.empty(sum(sizes), dtype=torch.int32)
    ranks.broadcast(arrays)
    parts = torch.split(arrays, sizes)
    token_ids, positions, rows, slots, starts, lens, tables, of_runs, *in_windows = parts
    batch = PagedBatch(slots, starts, lens, tables.view(num_sequences, num_columns))
    windowed = None
    if has_windows:
        slots, tables = in_windows
        windowed = PagedBatch(slots, starts, lens, tables.view(num_sequences, num_columns))
    runs = [
        Run(start, stop, None if before == _NONE else before, after)
        for start, stop, before, after in of_runs.view(-1, 4).tolist()
    ]
    step = Step(token_ids, positions, rows, batch, num_microbatches, runs, windowed)
    return Order(Verb.STEP, step=step)


def _arrays(step: Step) -> list[torch.Tensor]:
    batch = step.batch
    arrays = [step.token_ids, step.positions, step.rows, batch.slots]
    runs = [
        (it.start, it.stop, _NONE if it.before is None else it.before, it.after) for it in step.runs
    ]
    arrays += [batch.query_starts, batch.context_lens, batch.block_tables]
    arrays.append(torch.tensor(runs, dtype=torch.int32))
    if step.windowed is not None:
        arrays += [step.windowed.slots, step.windowed.block_tables]
    return arrays


def _header(*numbers: int) -> torch.Tensor:
    return torch.tensor([*numbers, *[0] * (HEADER - len(numbers))], dtype=torch.int32)
