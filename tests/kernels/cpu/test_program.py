"""Operations run in their order, each once, on any number of threads, any number of times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kernels.cpu.intrinsics import ints_at
from kernels.cpu.program import Operation, Program
from kernels.cpu.threads import take

SIZE = 100
Numbers = npt.NDArray[np.int32]


class AddNext(NamedTuple):
    size: int
    source: int
    target: int
    taken: int = 0


def add_next(a: AddNext, _thread: int) -> None:
    """To[i] = from[i] + from[i + 1] + 1."""
    source, target = ints_at(a.source), ints_at(a.target)
    while True:
        index = take(a, 1)
        if index >= a.size:
            return
        target[index] = source[index] + source[(index + 1) % a.size] + 1


def steps(count: int) -> tuple[Numbers, list[Operation]]:
    """Operations that each read what two rounds of the one before wrote, and where it ends."""
    rows = np.zeros((2, SIZE), np.int32)
    addresses = [row.ctypes.data for row in rows]
    operations = [
        Operation(add_next, AddNext(SIZE, addresses[i % 2], addresses[1 - i % 2]), (rows,))
        for i in range(count)
    ]
    return rows[count % 2], operations


def after(count: int) -> list[int]:
    """`count` operations x -> 2 x + 1, applied to zeros."""
    return [2**count - 1] * SIZE


@pytest.mark.parametrize("num_threads", [0, 1, 2, 7])
@pytest.mark.parametrize("count", [1, 2, 25])
def test_an_operation_begins_when_the_one_before_is_done(num_threads: int, count: int) -> None:
    end, operations = steps(count)
    Program(operations).run(num_threads)
    assert end.tolist() == after(count)


def test_an_empty_program_does_nothing() -> None:
    Program([]).run()


class Weights(NamedTuple):
    operation: int
    heard: int
    next_even: int = 0
    next_odd: int = 0
    taken: int = 0


def note_next(a: Weights, _thread: int) -> None:
    """Write down what an operation is told of the weights that come next."""
    if take(a, 1) == 0:
        ints_at(a.heard)[2 * a.operation] = a.next_even
        ints_at(a.heard)[2 * a.operation + 1] = a.next_odd


def test_operations_hear_of_the_weights_that_come_next() -> None:
    heard = np.zeros((4, 2), np.int32)
    weights = ((7, 70), None, (8, 80), (9, 90))
    Program(
        [
            Operation(note_next, Weights(index, heard.ctypes.data), (heard,), own)
            for index, own in enumerate(weights)
        ]
    ).run()
    assert heard.tolist() == [[8, 80], [8, 80], [9, 90], [7, 70]], "the last: of the next run"
