"""Status and metrics around any executor, on a clock that the test moves."""

import pytest

from scripts.examples import own_model
from tests.worker.poisoned import POISON, PoisonedExecutor
from wire.options import Options
from worker.engine.direct import Direct
from worker.engine.engine import Engine
from worker.engine.measured import MeasuredExecutor, State, measured
from worker.engine.outputs import Token
from worker.engine.sequence import Sequence
from worker.executor.batch import Batch
from worker.executor.contract import Executor, SampledToken, Scorer, SequenceFailed
from worker.executor.hash import HashExecutor, create, oracle
from worker.executor.metrics import Latency

GREEDY = Options(ignore_eos=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowExecutor(HashExecutor):
    """A step lasts a second, a prompt token half a second more; `seen` is what it saw of itself."""

    def __init__(self, clock: Clock) -> None:
        executor = create()
        super().__init__(executor.info)
        self.clock = clock
        self.seen: list[State] = []
        self.owner: MeasuredExecutor | None = None
        self.is_broken = False
        self.temperatures: list[float] = []

    def forward(self, batch: Batch) -> list[int]:
        if self.is_broken:
            raise RuntimeError("out of memory")
        if self.owner is not None:
            status = self.owner.status()
            self.seen.append(status.state)
            assert status.batch_sequences == len(batch.context_lens)
        self.clock.now += 1.0 + 0.5 * (len(batch.token_ids) - len(batch.context_lens))
        return super().forward(batch)

    def sample(self, logits: list[int], batch: Batch) -> list[SampledToken]:
        self.temperatures += [it.options.temperature for it in batch.samplings]
        return super().sample(logits, batch)


def slow() -> tuple[SlowExecutor, MeasuredExecutor]:
    clock = Clock()
    executor = SlowExecutor(clock)
    executor.owner = MeasuredExecutor(executor, clock=clock)
    return executor, executor.owner


def test_it_is_the_same_executor() -> None:
    executor: Executor = create()
    around = measured(executor)
    assert (around.info, around.capabilities) == (executor.info, executor.capabilities)
    assert measured(around) is around
    engine = Engine(around, num_blocks=16, block_size=4)
    engine.add(Sequence(1, [5, 6, 7], GREEDY, 9))
    tokens = []
    while engine.has_work():
        tokens += [output.token_id for output in engine.step() if isinstance(output, Token)]
    assert tokens == oracle([5, 6, 7], 9, GREEDY)


def test_it_scores_prompts_exactly_if_the_executor_does() -> None:
    assert isinstance(measured(create()), Scorer)
    assert not isinstance(measured(own_model.create()), Scorer)


def test_the_states_of_a_life() -> None:
    executor, around = slow()
    assert around.status().state is State.INITIALIZING
    cache = around.allocate(8, 4)
    assert around.status().state is State.READY and around.status().last_step_s is None
    Direct(around, cache).prefill([1, 2, 3])
    assert executor.seen == [State.BUSY]
    assert around.status().state is State.READY and around.status().last_step_s == 102.0
    around.shutdown()
    assert around.status().state is State.SHUTDOWN


def test_a_step_that_raises_is_an_error_state() -> None:
    executor, around = slow()
    direct = Direct(around, around.allocate(8, 4))
    executor.is_broken = True
    with pytest.raises(RuntimeError, match="out of memory"):
        direct.prefill([1])
    assert around.status().state is State.ERROR


def test_a_sequence_that_fails_leaves_it_ready_and_is_not_counted() -> None:
    executor = PoisonedExecutor()
    around = measured(executor)
    direct = Direct(around, around.allocate(8, 4))
    for place in ("forward", "sample"):
        executor.place = place
        with pytest.raises(SequenceFailed, match="token 13"):
            direct.prefill([POISON])
        assert around.status().state is State.READY and around.status().batch_sequences == 0
    assert around.metrics().num_steps == 0
    direct.prefill([5])
    assert around.metrics().num_steps == 1


def test_metrics_count_steps_time_and_tokens() -> None:
    _, around = slow()
    direct = Direct(around, around.allocate(32, 4))
    assert around.metrics().tokens_per_second == around.metrics().mean_batch_sequences == 0.0
    sequences = direct.batch_prefill([[1, 2, 3], [4, 5]])  # 2.5 s
    for _ in range(4):
        direct.batch_decode(sequences)  # 1 s
    metrics = around.metrics()
    assert metrics.prefill == Latency(1, 2.5, 2.5, 2.5)
    assert metrics.decode == Latency(4, 1.0, 1.0, 1.0)
    assert metrics.tokens_per_second == pytest.approx(10 / 6.5)
    assert metrics.mean_batch_sequences == 2.0


def test_a_chunk_without_a_sample_is_a_step_too() -> None:
    _, around = slow()
    engine = Engine(around, num_blocks=16, block_size=4, max_ubatch_tokens=4)
    engine.add(Sequence(1, range(1, 9), GREEDY, 1))
    while engine.has_work():
        engine.step()
    assert around.metrics().prefill.num_steps == 2
    assert around.status().state is State.READY


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 1), (2, 1), (1, 2), (1, 3), (9, 16)])
def test_the_warmup_fits_any_cache_and_is_not_counted(num_blocks: int, block_size: int) -> None:
    executor, around = slow()
    executor.owner = None
    around.allocate(num_blocks, block_size)
    around.warmup()
    assert executor.clock.now > 100.0
    assert executor.temperatures and all(it > 0 for it in executor.temperatures)
    assert around.metrics().num_steps == 0 and around.status().state is State.READY


def test_memory_is_what_was_allocated() -> None:
    around = measured(create())
    assert around.status().memory.kv_cache_bytes == 0
    around.allocate(8, 4)
    memory = around.status().memory
    assert (memory.parameter_bytes, memory.kv_cache_bytes) == (0, 8 * 4 * 64)
    assert memory.peak_bytes > 1 << 20
