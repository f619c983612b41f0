"""KV leaves and comes back byte for byte, within its bound, when that is cheaper."""

import numpy as np
import pytest

from tests.kv import whole
from wire.options import Options
from worker.engine.engine import Engine
from worker.engine.sequence import Sequence
from worker.engine.swap import Costs, Swap, SwapSpace
from worker.executor.batch import Batch
from worker.executor.hash import (
    LAYOUT,
    HashExecutor,
    HashKVCache,
    create,
)

TOKEN_BYTES = LAYOUT.token_bytes


def space(max_tokens: int = 100) -> tuple[SwapSpace, HashKVCache]:
    cache = HashKVCache(16, 4)
    cache.kv[:] = np.random.default_rng(0).integers(0, 256, cache.kv.shape, np.uint8)
    swap = SwapSpace(cache, max_tokens * TOKEN_BYTES, lambda: 0.0)
    swap.costs = Costs(copy_bytes_per_s=1e12)
    return swap, cache


@pytest.mark.parametrize("cached", [0, 4, 8])
def test_it_comes_back_as_it_left(cached: int) -> None:
    swap, cache = space()
    sequence = Sequence(1, range(11))
    before = bytes(cache.pack((3, 9, 5), whole(LAYOUT, cached, 10 - cached)))
    swap.hold(1, 10)
    swap.carry_out([Swap(sequence, (3, 9, 5), 0, 10)])
    assert (swap.num_bytes, swap.num_tokens(1), len(swap)) == (10 * TOKEN_BYTES, 10, 1)
    cache.kv[:] = 0
    swap.carry_in([Swap(sequence, (1, 2, 4), cached, 10 - cached)])
    after = cache.pack((1, 2, 4), whole(LAYOUT, cached, 10 - cached))
    assert bytes(after) == before
    assert not cache.kv[1 : 2 if cached else 1].any(), "a shared block was written to"
    assert (swap.num_bytes, swap.num_tokens(1), len(swap)) == (0, 0, 0)


def test_it_is_bounded() -> None:
    swap, _ = space(max_tokens=10)
    assert swap.accepts(10) and not swap.accepts(11) and not swap.accepts(0)
    swap.hold(1, 6)
    assert swap.accepts(4) and not swap.accepts(5)
    swap.drop(1)
    swap.drop(1)
    assert swap.accepts(10)
    assert not space(max_tokens=0)[0].accepts(1)


def test_the_cheaper_is_chosen() -> None:
    costs = Costs(copy_bytes_per_s=1000.0, prefill_tokens_per_s=10.0)
    assert costs.prefers_swap(499, 10), "0.998 s against 1 s"
    assert not costs.prefers_swap(500, 10)


def test_a_measurement_weighs_the_time_that_it_took() -> None:
    costs = Costs(copy_bytes_per_s=1e9, prefill_tokens_per_s=10_000.0)
    for _ in range(20):  # alone, each would say 100 a second
        costs.observe_prefill(1, 0.010)
        costs.observe_copy(1000, 0.00001)
        costs.observe_copy(10**8, 0.1)
        costs.observe_copy(600, 0.0)  # the clock did not move
    assert costs.prefill_tokens_per_s > 6700
    assert costs.copy_bytes_per_s == pytest.approx(1e9, rel=0.001)


class TimedExecutor(HashExecutor):
    """The hash executor with a clock: 10 ms a step and 0.1 ms a token."""

    def __init__(self) -> None:
        super().__init__(create().info)
        self.now = 0.0

    def forward(self, batch: Batch) -> list[int]:
        self.now += 0.010 + 0.0001 * len(batch.token_ids)
        return super().forward(batch)


def timed_engine() -> tuple[Engine, TimedExecutor]:
    executor = TimedExecutor()
    return Engine(executor, num_blocks=100, block_size=16, clock=lambda: executor.now), executor


def test_decode_steps_do_not_count_for_the_prefill_rate() -> None:
    engine, _ = timed_engine()
    for request_id in range(40):
        engine.add(Sequence(request_id, [3 + request_id], Options(ignore_eos=True), 50))
    engine.step()
    engine.add(Sequence(40, range(100, 110), Options(ignore_eos=True), 2))
    engine.step()
    assert engine.swap.costs.prefill_tokens_per_s == 10_000, "mostly decode"
    engine.add(Sequence(41, range(200, 500), Options(ignore_eos=True), 2))
    engine.step()
    step_s = 0.010 + 0.0001 * (300 + 41)
    expected = (5000 + 300) / (0.5 + step_s)
    assert engine.swap.costs.prefill_tokens_per_s == pytest.approx(expected)


def test_check_finds_kv_of_no_sequence() -> None:
    swap, _ = space()
    swap.hold(1, 4)
    swap.check([1])
    with pytest.raises(AssertionError, match="does not wait"):
        swap.check([2])
