"""Messages between processes arrive whole, and at the right one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests.worker.compute.processes import TIMEOUT_S, Processes
from worker.compute.connection import ProcessLost
from worker.compute.ranks import Ranks
from worker.model.shard import Shard


def all_reduce(ranks: Ranks, summands: torch.Tensor) -> torch.Tensor:
    own = summands[ranks.shard.process].clone()
    ranks.all_reduce(own)
    return own


def test_shards_add_up_a_row_alike_whoever_shares_the_batch(processes: Processes) -> None:
    summands = torch.randn(4, 9, 33, generator=torch.Generator().manual_seed(1))
    for size in (1, 2, 3, 4):
        wanted = summands[0].clone()
        for summand in summands[1:size]:
            wanted += summand
        for found in processes.run(size, 1, all_reduce, summands):
            assert torch.equal(found, wanted)
        for row in (0, 5):
            alone = processes.run(size, 1, all_reduce, summands[:, row : row + 1])
            assert torch.equal(alone[0][0], wanted[row])


def test_stages_add_up_each_for_itself(processes: Processes) -> None:
    summands = torch.arange(4, dtype=torch.bfloat16)[:, None]
    assert [int(it) for it in processes.run(2, 2, all_reduce, summands)] == [1, 1, 5, 5]


def gather(ranks: Ranks, num_rows: int) -> torch.Tensor:
    rows = torch.arange(num_rows)[:, None] * 10
    return ranks.gather(rows + ranks.shard.rank * 2 + torch.arange(2))


def test_columns_are_gathered_by_the_first_of_a_stage(processes: Processes) -> None:
    first, second = processes.run(2, 1, gather, 2)
    assert first.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]] and second.shape == (0, 4)
    assert [len(it) for it in processes.run(2, 2, gather, 3)] == [3, 0, 3, 0]
    assert [len(it) for it in processes.run(2, 1, gather, 0)] == [0, 0]
    assert len(processes.run(1, 1, gather, 3)[0]) == 3


def hand_on(ranks: Ranks) -> list[int]:
    got = []
    for step in range(3):
        hidden = torch.full((step + 1,), ranks.shard.rank)
        if not ranks.shard.is_first:
            ranks.receive(hidden)
        got.append(int(hidden.sum()))
        if not ranks.shard.is_last:
            ranks.send(hidden + 1)
    return got


def test_each_shard_of_a_stage_hands_on_to_the_same_of_the_next(processes: Processes) -> None:
    assert processes.run(1, 3, hand_on) == [[2, 4, 6], [1, 2, 3], [0, 0, 0]]
    assert processes.run(2, 2, hand_on) == [[1, 2, 3], [2, 4, 6], [0, 0, 0], [1, 2, 3]]


def hand_on_and_leave(ranks: Ranks) -> int:
    """Send what nobody else keeps; it is read when the other stage wants it."""
    hidden = torch.zeros(1 << 23, dtype=torch.uint8)  # does not all fit into a socket at once
    if ranks.shard.is_first:
        ranks.send(hidden + 1)
        hidden.clone()  # lies where that lay, if nothing keeps it
        ranks.send_to(torch.zeros(1), 0)
        return 1 << 23
    ranks.receive_from(torch.empty(1), 1)
    ranks.receive(hidden)
    return int(hidden.sum())


def test_what_was_handed_on_arrives_though_the_stage_leaves(processes: Processes) -> None:
    assert processes.run(1, 2, hand_on_and_leave) == [1 << 23] * 2


def tell(ranks: Ranks) -> list[int]:
    numbers = torch.full((3,), ranks.shard.process + 7, dtype=torch.int32)
    ranks.broadcast(numbers)
    return numbers.tolist()


def test_all_hear_what_the_leader_tells(processes: Processes) -> None:
    assert processes.run(2, 2, tell) == [[7, 7, 7]] * 4


def agree(ranks: Ranks, *texts: str) -> bool:
    return ranks.agree(texts[ranks.shard.process])


def test_all_learn_whether_one_of_them_says_something_else(processes: Processes) -> None:
    for others in ("aaa", "aab", "aba"):
        assert processes.run(2, 2, agree, "a", *others) == [others == "aaa"] * 4


def wait_for_the_dead(ranks: Ranks, dead: int, method: str) -> NoReturn:
    if ranks.shard.process == dead:
        os._exit(1)
    while True:  # until it is dead, a few messages still find room on their way
        getattr(ranks, method)(torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("dead", "method", "stages"),
    [
        (0, "broadcast", 1),
        (1, "broadcast", 1),
        (1, "all_reduce", 1),
        (1, "receive", 2),
        (0, "send", 2),
    ],
)
def test_the_others_notice_that_a_process_has_died(
    dead: int, method: str, stages: int, tmp_path: Path
) -> None:
    with Processes(2, tmp_path) as started, pytest.raises(AssertionError, match="ProcessLost"):
        started.run(2 // stages, stages, wait_for_the_dead, dead, method)


def wait_for_one_that_computes_nothing(ranks: Ranks) -> None:
    ranks._timeout_s = 0.5  # noqa: SLF001 - now, as the processes have met
    if ranks.is_leader:
        with pytest.raises(ProcessLost, match=r"process 1 has not answered for 0\.5 s"):
            ranks.receive(torch.zeros(1))
    ranks.broadcast(torch.zeros(1))  # for which the others wait as long as it takes


def test_one_that_computes_nothing_counts_as_dead_after_a_time(processes: Processes) -> None:
    processes.run(1, 2, wait_for_one_that_computes_nothing)


def test_one_that_has_no_gpu_where_the_other_has_one_says_what_to_do(tmp_path: Path) -> None:
    def join(process: int) -> str:
        device = torch.device("cpu" if process else "cuda")
        with pytest.raises(ValueError) as caught:
            Ranks(Shard.of_process(process, 2, 1), f"file://{tmp_path}/meet", device, TIMEOUT_S)
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(join, range(2))
    assert "or --device cpu where there are fewer) is cuda for process 0 and cpu for" in first
    assert "is cpu for process 1 and cuda for process 0" in other
