"""Status and metrics around any executor; and what every executor must do, driven by hand."""

import random
from collections.abc import Callable

import pytest

from scripts.examples import own_model
from scripts.models.make_model import make_model
from tests.oracle import oracle
from tests.worker.executor.forward_pair import pair
from tests.worker.late import LateExecutor
from tests.worker.poisoned import POISON, PoisonedExecutor
from wire.options import Options
from worker.compute.contract import KVCache
from worker.engine.engine import Engine
from worker.engine.instrumented import (
    WINDOW,
    Direct,
    Latency,
    MeasuredExecutor,
    State,
    Stopwatch,
    measured,
)
from worker.engine.outputs import Token
from worker.engine.sequence import Sequence
from worker.executor.batch import Batch
from worker.executor.contract import Drawer, Executor, SampledToken, SequenceFailed
from worker.executor.hash import HashExecutor, create
from worker.executor.torch import TorchExecutor

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


def late(clock: Clock) -> MeasuredExecutor:
    """A device on which a step takes two seconds, and the host one to ask for it."""

    class Late(LateExecutor):
        def forward(self, batch: Batch) -> list[int]:
            clock.now += 1.0
            return super().forward(batch)

    executor = Late(create().info, random.Random(0))
    device, wait = executor.device, executor.device.wait

    def waited(number: int) -> None:
        clock.now += 1.0 * (number - device.num_run > 0)
        wait(number)

    device.wait = waited  # type: ignore[method-assign]
    return MeasuredExecutor(executor, clock=clock)


def test_steps_of_which_one_is_begun_behind_the_other_are_measured_one_after_the_other() -> None:
    around = late(clock := Clock())
    engine = Engine(around, num_blocks=16, block_size=4)
    assert isinstance(around, Drawer) and not isinstance(measured(create()), Drawer)
    engine.add(Sequence(1, [5, 6, 7], GREEDY, 5))
    states, began, tokens = [], clock.now, []
    while engine.has_work():
        tokens += [it.token_id for it in engine.step() if isinstance(it, Token)]
        states.append(around.status().state)
    assert tokens == oracle([5, 6, 7], 5, GREEDY)
    # The prompt is read at once; then each call begins a step and reads the one before.
    assert states == [State.READY, *[State.BUSY] * 4, State.READY]
    metrics = around.metrics()
    assert (metrics.prefill.num_steps, metrics.decode.num_steps) == (1, 4)
    assert metrics.tokens_per_second == pytest.approx(5 / (clock.now - began))


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


def test_percentiles_forget_old_steps_and_the_mean_does_not() -> None:
    stopwatch = Stopwatch()
    assert stopwatch.latency() == Latency(0, 0.0, 0.0, 0.0)
    for milliseconds in range(100, 0, -1):
        stopwatch.add(milliseconds / 1000)
    latency = stopwatch.latency()
    assert (latency.num_steps, latency.p50_s, latency.p95_s) == (100, 0.05, 0.095)
    assert latency.mean_s == pytest.approx(0.0505)
    for _ in range(WINDOW):
        stopwatch.add(1.0)
    latency = stopwatch.latency()
    assert (latency.num_steps, latency.p50_s, latency.p95_s) == (WINDOW + 100, 1.0, 1.0)
    assert latency.mean_s == pytest.approx((WINDOW + 5.05) / (WINDOW + 100))


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 1), (2, 1), (1, 2), (1, 3), (9, 16)])
def test_the_warmup_fits_any_cache_and_is_not_counted(num_blocks: int, block_size: int) -> None:
    executor, around = slow()
    executor.owner = None
    around.allocate(num_blocks, block_size)
    around.warmup()
    assert executor.clock.now > 100.0
    assert executor.temperatures and all(it > 0 for it in executor.temperatures)
    assert around.metrics().num_steps == 0 and around.status().state is State.READY


Make = Callable[[], Executor]
OPTIONS = Options(ignore_eos=True)


@pytest.fixture(scope="module", params=["hash", "functions", "forward", "torch"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    if request.param == "torch":
        path = make_model(tmp_path_factory.mktemp("model"))
        return lambda: TorchExecutor.load(path, name="tiny", dtype="float32", device="cpu")
    makes: dict[str, Make] = {"hash": create, "functions": own_model.create, "forward": pair}
    return makes[request.param]


def start(make: Make, block_size: int = 4) -> tuple[Direct, KVCache]:
    executor = make()
    cache = executor.allocate(24, block_size)
    return Direct(executor, cache), cache


def prompt(executor: Make, length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(min(executor().info.vocab_size, 200)), k=length)


def text(direct: Direct, token_ids: list[int], num_tokens: int) -> list[int]:
    sequence = direct.prefill(token_ids, OPTIONS)
    for _ in range(num_tokens - 1):
        direct.decode(sequence)
    direct.release_cache(sequence)
    return sequence.token_ids[len(token_ids) :]


@pytest.mark.parametrize("length", [1, 2, 9])
def test_reading_at_once_and_token_by_token_say_the_same(make: Make, length: int) -> None:
    direct, _ = start(make)
    token_ids = prompt(make, length)
    generated = text(direct, token_ids, 8)
    for num_read in (1, 4, 7):
        read = token_ids + generated[:num_read]
        assert text(direct, read, 1) == generated[num_read : num_read + 1]


def test_a_batch_says_what_each_says_alone(make: Make) -> None:
    direct, _ = start(make)
    prompts = [prompt(make, length, length) for length in (1, 6, 11)]
    alone = [text(direct, each, 5) for each in prompts]
    sequences = direct.batch_prefill(prompts, OPTIONS)
    for _ in range(4):
        tokens = direct.batch_decode(sequences)
    assert [token.token_id for token in tokens] == [each[-1] for each in alone]
    generated = [s.token_ids[s.prompt_len :] for s in sequences]
    assert generated == alone
