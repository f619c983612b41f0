"""Copies of other processes' KV: from any thread, beside steps, and never before they are done."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from tests.worker.compute.processes import CPU, TIMEOUT_S, Processes
from tests.worker.parallel.divided import model_of
from wire.transfer import Rectangle, plan
from worker.compute.kv_cache import TorchKVCache
from worker.compute.ranks import Ranks
from worker.parallel.kv_cache import Copying, ShardedKVCache
from worker.parallel.kv_copies import OwnPart, RemotePart, Steps, serve_copies
from worker.parallel.partition import Part

NUM_THREADS, ROUNDS, BLOCK_SIZE, NUM_TOKENS = 6, 2, 4, 11
NUM_BLOCKS = 3 * NUM_THREADS


def copy_by_many_threads(ranks: Ranks) -> None:
    whole, steps = model_of([None, 3, None], size=2, stages=2), Steps()
    layout = whole.parts[ranks.shard.process].layout
    cache = TorchKVCache(layout, NUM_BLOCKS, BLOCK_SIZE, CPU)
    if not ranks.is_leader:
        return serve_copies(ranks, cache, steps)
    first, *others = whole.parts
    asking = [RemotePart(ranks, part, steps) for part in others]
    every: list[tuple[Part, Copying]] = [(first, OwnPart(cache, first))]
    every += zip(others, asking, strict=True)
    sharded = ShardedKVCache(whole.layout, cache, every)

    def put_in_and_take_out(thread: int) -> None:
        table = [*range(thread, NUM_BLOCKS, NUM_THREADS)]
        draw = np.random.default_rng(thread)
        for _ in range(ROUNDS):
            kept = dict[Rectangle, bytes]()
            for rectangle in plan(whole.layout, 0, NUM_TOKENS, 99, 2, sharded.stages):
                kept[rectangle] = draw.bytes(rectangle.num_bytes(whole.layout))
                sharded.unpack(table, rectangle, kept[rectangle])
            for rectangle, segment in kept.items():
                assert sharded.pack(table, rectangle) == segment

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(put_in_and_take_out, range(NUM_THREADS)))
    for it in asking:
        it.end()


def test_threads_copy_at_once_and_each_gets_its_own(processes: Processes) -> None:
    processes.run(2, 2, copy_by_many_threads)


class Noted(Steps):
    """Says when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait_for(self, count: int) -> None:
        self.is_awaited.set()
        super().wait_for(count)


def copy_ahead_of_a_step(ranks: Ranks) -> None:
    """The leader has computed a step that the other process has not."""
    part, steps = model_of([None]).parts[0]._replace(process=1), Noted()
    cache = TorchKVCache(part.layout, NUM_BLOCKS, BLOCK_SIZE, CPU)
    if ranks.is_leader:
        asking = RemotePart(ranks, part, steps)
        steps.add()
        packed = asking.pack([4, 0, 2], Rectangle(0, range(1), range(2), range(NUM_TOKENS)))
        assert (np.frombuffer(packed, np.float32) == 7).all()
        asking.end()
    else:
        answering = threading.Thread(target=serve_copies, args=(ranks, cache, steps))
        answering.start()
        assert steps.is_awaited.wait(TIMEOUT_S)
        cache.pool.fill_(7)
        steps.add()
        answering.join()


def test_what_is_copied_is_that_of_all_steps_before(processes: Processes) -> None:
    processes.run(2, 1, copy_ahead_of_a_step)


def put_in_before_telling(ranks: Ranks) -> None:
    """The leader tells nobody of KV before it lies with the other process."""
    num_blocks = 1 << 16  # so many that they do not all fit into a socket at once
    part, steps = model_of([None]).parts[0]._replace(process=1), Steps()
    cache = TorchKVCache(part.layout, num_blocks, BLOCK_SIZE, CPU)
    rectangle = Rectangle(0, range(1), range(2), range(num_blocks * BLOCK_SIZE))
    if ranks.is_leader:
        asking = RemotePart(ranks, part, steps)
        asking.unpack([*range(num_blocks)], rectangle, b"7" * rectangle.num_bytes(part.layout))
        ranks.broadcast(torch.zeros(1))
        asking.end()
    else:
        answering = threading.Thread(target=serve_copies, args=(ranks, cache, steps))
        answering.start()
        ranks.broadcast(torch.zeros(1))
        assert cache.pool.all(), "not all has been put in"
        answering.join()


def test_what_is_put_in_is_there_when_the_leader_goes_on(processes: Processes) -> None:
    processes.run(2, 1, put_in_before_telling)


def test_who_waits_for_steps_goes_on_after_so_many() -> None:
    steps, passed = Steps(), list[int]()

    def wait(count: int) -> None:
        steps.wait_for(count)
        passed.append(count)

    wait(0)
    waiting = threading.Thread(target=wait, args=(2,))
    waiting.start()
    steps.add()
    assert passed == [0]
    steps.add()
    waiting.join()
    assert passed == [0, 2] and steps.count == 2
