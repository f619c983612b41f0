"""The engine in a program: stepped by the caller or by its thread; every request ends once."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.oracle import oracle
from wire.errors import ErrorCode, LocalProtocolError, WireError
from wire.options import Options
from worker.embedded.requests import TokenOutput
from worker.embedded.serving import ServingEngine
from worker.engine.engine import Engine
from worker.engine.instrumented import State
from worker.executor.batch import Batch
from worker.executor.hash import HashExecutor, create

PROMPT = [5, 6, 7, 8]
GREEDY = Options(ignore_eos=True, max_tokens=9)
ENDLESS = Options(ignore_eos=True)
TEXT = oracle(PROMPT, 9, GREEDY)
PATIENCE_S = 20.0
# Room for an endless text to run for seconds.
ROOM: dict[str, Any] = {"num_blocks": 8192, "block_size": 4}


class GatedExecutor(HashExecutor):
    """A step waits for the gate."""

    def __init__(self) -> None:
        super().__init__(create().info)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.is_broken = False
        self.most_tokens = 0

    def forward(self, batch: Batch) -> list[int]:
        self.entered.set()
        self.most_tokens = max(self.most_tokens, len(batch.token_ids))
        assert self.gate.wait(PATIENCE_S)
        if self.is_broken:
            raise RuntimeError("out of memory")
        return super().forward(batch)


def stepped(**settings: int) -> ServingEngine:
    return ServingEngine(create(), **{"num_blocks": 64, "block_size": 4} | settings)


@pytest.fixture
def executor() -> GatedExecutor:
    return GatedExecutor()


@pytest.fixture
def serving(executor: GatedExecutor) -> Iterator[ServingEngine]:
    with ServingEngine(executor, **ROOM) as serving:
        executor.entered.clear()
        yield serving
        executor.gate.set()
    assert serving.metrics().load.used == 0 or serving.metrics().failed


async def until(condition: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# Stepped by the caller.


def test_submit_run_iterations_get_the_result() -> None:
    serving = stepped()
    heard: list[TokenOutput] = []
    request_id = serving.submit(PROMPT, GREEDY, heard.append)
    returned: list[TokenOutput] = []
    while not serving.is_complete(request_id):
        assert serving.get_result(request_id) is None
        returned += serving.run_iteration()
    assert heard == returned
    assert [output.token_id for output in heard] == TEXT
    assert [output.finish_reason for output in heard] == [None] * 8 + ["length"]
    result = serving.get_result(request_id)
    assert result is not None and result.token_ids == tuple(TEXT)
    assert (result.prompt_tokens, result.finish_reason, result.error) == (4, "length", None)
    assert serving.run_iteration() == []


def test_impossible_requests_end_with_an_error() -> None:
    serving = stepped()
    request_ids = [serving.submit([]), serving.submit([5] * 300), serving.submit([10**6])]
    outputs = serving.run_iteration()
    assert [output.request_id for output in outputs] == request_ids
    codes = [output.error.code for output in outputs if output.error is not None]
    assert codes == [
        ErrorCode.INVALID_REQUEST,
        ErrorCode.OUT_OF_BLOCKS,
        ErrorCode.INVALID_REQUEST,
    ]
    assert serving.metrics().failed == 3


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("hello", {}, r"token_ids\[0\] is 'h', not an integer"),
    (PROMPT, {"seed": -1, "temperature": 1.0}, "seed is -1: Expected `int` >= 0"),
]


@pytest.mark.parametrize(("token_ids", "options", "message"), BAD)
def test_invalid_arguments_are_refused_and_other_requests_go_on(
    token_ids: Any, options: dict[str, Any], message: str
) -> None:
    serving = stepped()
    neighbour = serving.submit(PROMPT, GREEDY)
    serving.run_iteration()
    heard: list[TokenOutput] = []
    with pytest.raises((TypeError, ValueError), match=message):
        serving.submit(token_ids, Options(max_tokens=3, **options), heard.append)
    while not serving.is_complete(neighbour):
        serving.run_iteration()
    result = serving.get_result(neighbour)
    assert result is not None and list(result.token_ids) == TEXT
    metrics = serving.metrics()
    assert (metrics.submitted, metrics.completed, metrics.failed, heard) == (1, 1, 0, [])


def test_an_error_between_steps_ends_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = stepped()
    request_id = serving.submit(PROMPT, GREEDY)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Engine, "add", broken)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        serving.submit(PROMPT)
    result = serving.get_result(request_id)
    assert result is not None and result.finish_reason == "error"
    metrics = serving.metrics()
    assert (metrics.submitted, metrics.failed) == (2, 2)  # none is left open
    with pytest.raises(WireError, match="a bug of ours"):
        serving.submit(PROMPT)


def test_logprobs_of_the_prompt_come_with_the_first_token() -> None:
    serving = stepped()
    serving.submit(PROMPT, Options(max_tokens=2, prompt_logprobs=1))
    first, second = serving.run_iteration(), serving.run_iteration()
    assert [bool(output.prompt_logprobs) for output in first + second] == [True, False]


def test_cancelled_between_two_iterations() -> None:
    serving = stepped()
    heard: list[TokenOutput] = []
    request_id = serving.submit(PROMPT, ENDLESS, heard.append)
    serving.run_iteration()
    serving.cancel(request_id)
    serving.cancel(request_id)
    assert serving.run_iteration() == []
    assert [output.finish_reason for output in heard] == [None, "cancelled"]
    metrics = serving.metrics()
    assert (metrics.cancelled, metrics.load.used, metrics.running) == (1, 0, 0)


def test_an_executor_that_breaks_ends_every_request(executor: GatedExecutor) -> None:
    serving = ServingEngine(executor, num_blocks=64)
    request_ids = [serving.submit(PROMPT), serving.submit(PROMPT)]
    executor.is_broken = True
    with pytest.raises(RuntimeError, match="out of memory"):
        serving.run_iteration()
    for request_id in request_ids:
        result = serving.get_result(request_id)
        assert result is not None and result.finish_reason == "error"
    assert serving.metrics().status.state is State.ERROR
    for call in (serving.run_iteration, lambda: serving.submit(PROMPT)):
        with pytest.raises(WireError, match="out of memory"):
            call()


def test_memory_bytes_decide_the_number_of_blocks() -> None:
    assert stepped(num_blocks=None, memory_bytes=64 * 4 * 10).metrics().load.total == 10  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too few"):
        ServingEngine(create(), memory_bytes=100)


def test_settings_reach_the_engine(executor: GatedExecutor) -> None:
    serving = ServingEngine(executor, num_blocks=64, block_size=4, max_ubatch_tokens=3)
    request_id = serving.submit(PROMPT, GREEDY)
    while not serving.is_complete(request_id):
        serving.run_iteration()
    assert executor.most_tokens == 3 < len(PROMPT)
    with pytest.raises(ValueError, match="ageing_s is 0"):
        stepped(ageing_s=0)


def test_metrics_add_up() -> None:
    serving = stepped()
    done, running = serving.submit(PROMPT, GREEDY), serving.submit(PROMPT[:3], ENDLESS)
    while not serving.is_complete(done):
        serving.run_iteration()
    metrics = serving.metrics()
    assert (metrics.submitted, metrics.completed, metrics.running) == (2, 1, 1)
    assert (metrics.prompt_tokens, metrics.completion_tokens) == (7, 18)
    assert [slot.request_id for slot in serving.slots().active] == [running]
    assert metrics.executor.prefill.num_steps == 1 and metrics.executor.decode.num_steps == 8
    serving.cancel(running)
    assert serving.metrics().submitted == 2


# Stepped by its thread.


async def test_await_the_result(serving: ServingEngine) -> None:
    results = await asyncio.gather(*(serving.submit_async([seed] * 5, GREEDY) for seed in range(4)))
    for seed, result in enumerate(results):
        assert list(result.token_ids) == oracle([seed] * 5, 9, GREEDY)
        assert result == serving.get_result(result.request_id)


async def test_stream_the_tokens(serving: ServingEngine) -> None:
    outputs = [output async for output in serving.stream(PROMPT, GREEDY)]
    assert [output.token_id for output in outputs] == TEXT
    assert [output.is_final for output in outputs] == [False] * 8 + [True]


async def test_a_failure_is_raised(serving: ServingEngine) -> None:
    with pytest.raises(WireError, match="the prompt is empty"):
        await serving.submit_async([])
    with pytest.raises(WireError, match="vocabulary"):
        async for _ in serving.stream([10**6]):
            pass


async def test_leaving_a_stream_cancels_it(serving: ServingEngine) -> None:
    stream = serving.stream(PROMPT, ENDLESS)
    assert (await anext(stream)).token_id == TEXT[0]
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: serving.metrics().cancelled == 1)
    assert serving.metrics().load.used == 0


async def test_a_cancelled_task_cancels_its_request(
    serving: ServingEngine, executor: GatedExecutor
) -> None:
    executor.gate.clear()
    task = asyncio.create_task(serving.submit_async(PROMPT, ENDLESS))
    await until(executor.entered.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    executor.gate.set()
    await until(lambda: serving.metrics().cancelled == 1)


async def test_a_cancel_from_elsewhere_is_raised_once(
    serving: ServingEngine, executor: GatedExecutor
) -> None:
    heard: list[TokenOutput] = []
    executor.gate.clear()
    request_id = serving.submit(PROMPT, ENDLESS, heard.append)
    task = asyncio.create_task(serving.submit_async(PROMPT[:2], ENDLESS))
    await until(lambda: serving.metrics().submitted == 2)
    for _ in range(3):
        serving.cancel(request_id)
        serving.cancel(request_id + 1)
    executor.gate.set()
    with pytest.raises(WireError, match="was cancelled") as raised:
        await task
    assert raised.value.code is ErrorCode.CANCELLED
    await until(lambda: serving.is_complete(request_id))
    assert [output.finish_reason for output in heard if output.is_final] == ["cancelled"]
    assert heard[-1].is_final and serving.metrics().cancelled == 2


async def test_a_crash_ends_every_request_and_takes_no_more(executor: GatedExecutor) -> None:
    with ServingEngine(executor, num_blocks=64) as serving:
        executor.is_broken = True
        tasks = [asyncio.create_task(serving.submit_async([seed])) for seed in range(3)]
        done, _ = await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert len(done) == 3
        for task in tasks:
            with pytest.raises(WireError, match=r"the engine broke: .*out of memory"):
                task.result()
        with pytest.raises(WireError, match="out of memory"):
            await serving.submit_async(PROMPT)
    assert serving.metrics().failed >= 1


async def test_close_ends_open_requests() -> None:
    with ServingEngine(create(), **ROOM) as serving:
        task = asyncio.create_task(serving.submit_async(PROMPT, ENDLESS))
        await until(lambda: serving.metrics().running == 1)
    with pytest.raises(WireError, match="closed") as raised:
        await task
    assert raised.value.code is ErrorCode.DRAINING
    assert serving.metrics().status.state is State.SHUTDOWN
    with pytest.raises(WireError, match="closed"):
        serving.submit(PROMPT)


async def test_a_thread_and_run_iteration_exclude_each_other(serving: ServingEngine) -> None:
    with pytest.raises(LocalProtocolError, match="own thread"):
        serving.run_iteration()
    with pytest.raises(LocalProtocolError, match="starts once"):
        serving.start()
    idle = stepped()
    with pytest.raises(LocalProtocolError, match="start the engine's thread first"):
        await idle.submit_async(PROMPT)
