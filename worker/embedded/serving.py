"""`ServingEngine`: the engine as a library inside a Python program, without a network.

Engine steps run on a thread, or the caller runs them; `scripts/examples/program.py` shows both.
Every request ends exactly once: its last output has a `finish_reason`, and no output follows it.
Prompts and outputs are token ids.  Tokenization, stop strings and HTTP belong to the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from wire.errors import ErrorCode, LocalProtocolError, WireError
from wire.options import Options
from wire.payloads import Load
from worker.embedded.arguments import checked_ids, checked_options
from worker.embedded.requests import Callback, Ledger, Result, TokenOutput
from worker.engine.engine import Engine
from worker.engine.instrumented import ExecutorStatus, Metrics, measured
from worker.engine.outputs import Failed, Output, Token
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.settings import EngineSettings
from worker.engine.stats import Slots
from worker.engine.thread import EngineThread
from worker.executor.contract import Executor

DEFAULT_MEMORY_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class ServingMetrics:
    """Totals since the engine was created, and the current load."""

    submitted: int
    completed: int
    cancelled: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    running: int
    waiting: int
    load: Load
    executor: Metrics
    status: ExecutorStatus


class ServingEngine:
    """An engine, its requests and their results.

    After `start`, `submit` and `cancel` are thread-safe until `close`.  If the caller runs the
    steps with `run_iteration` instead, all calls must come from one thread.  Callbacks run on the
    thread that runs the steps.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        num_blocks: int | None = None,
        block_size: int = 16,
        **settings: Any,
    ) -> None:
        """Allocate the KV cache and warm up the executor.

        Args:
            memory_bytes: Total for weights, activations and KV blocks; ignored with `num_blocks`.
            settings: Fields of `worker.engine.settings.EngineSettings`.

        Raises:
            ValueError: The memory is too small for this model.
        """
        self._executor = measured(executor)
        if num_blocks is None:
            memory = executor.capabilities.memory
            max_ubatch_tokens = EngineSettings(**settings).max_ubatch_tokens
            num_blocks = memory.num_blocks(memory_bytes, max_ubatch_tokens, block_size)
        self._engine = Engine(
            self._executor, num_blocks=num_blocks, block_size=block_size, **settings
        )
        self._executor.warmup()
        self._thread: EngineThread | None = None
        self._ledger = Ledger()

    # Running the engine steps: on a thread, or by the caller.

    def start(self) -> None:
        """Start a thread that runs the engine steps."""
        if self._thread is not None or self._ledger.closed is not None:
            raise LocalProtocolError("a serving engine starts once")
        self._thread = EngineThread(self._engine, self._deliver, self._crash)
        self._thread.start()

    def run_iteration(self) -> list[TokenOutput]:
        """Run one engine step, call the callbacks and return the outputs passed to them."""
        if self._thread is not None:
            raise LocalProtocolError("the engine's own thread runs the iterations")
        if self._ledger.closed is not None:
            raise self._ledger.closed
        with self._crashing():
            outputs = self._engine.step() if self._engine.has_work() else []
            return self._deliver(outputs)

    def close(self) -> None:
        """Cancel all open requests and free the executor's resources."""
        if self._thread is not None:
            self._thread.stop()
        error = WireError(ErrorCode.DRAINING, "the serving engine is closed")
        self._ledger.close("cancelled", error)
        self._executor.shutdown()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests.

    def submit(
        self,
        token_ids: Sequence[int],
        options: Options | None = None,
        callback: Callback | None = None,
    ) -> int:
        """Queue a request and return its id; `callback` is called with each `TokenOutput`.

        If the model cannot process the prompt, for example because it is too long, the request
        ends with an output that has an error.

        Raises:
            TypeError, ValueError: The ids or options are invalid; nothing was queued.
            WireError: The engine is closed or has failed.
        """
        sequence = EngineSequence(0, checked_ids(token_ids), checked_options(options))
        sequence.request_id = self._ledger.open(sequence.prompt_len, callback)
        self._post(lambda engine: engine.add(sequence))
        return sequence.request_id

    def cancel(self, request_id: int) -> None:
        """Cancel a request unless it has ended."""

        def cancel(engine: Engine) -> None:
            engine.cancel(request_id)
            error = WireError(ErrorCode.CANCELLED, f"request {request_id} was cancelled")
            self._ledger.end(request_id, "cancelled", error)

        self._post(cancel)

    def is_complete(self, request_id: int) -> bool:
        """Whether the request has a result; only the latest `MAX_RESULTS` results are kept."""
        return self._ledger.result(request_id) is not None

    def get_result(self, request_id: int) -> Result | None:
        """Return the result of a request, or None while it runs."""
        return self._ledger.result(request_id)

    async def submit_async(
        self, token_ids: Sequence[int], options: Options | None = None
    ) -> Result:
        """Submit a request and wait for its result; cancelling the task cancels the request.

        Raises WireError if the request fails or is cancelled by `cancel`.
        """
        outputs = [output async for output in self.stream(token_ids, options)]
        last = outputs[-1]
        assert last.finish_reason is not None
        generated = tuple(out.token_id for out in outputs if out.token_id is not None)
        return Result(last.request_id, len(token_ids), generated, last.finish_reason)

    async def stream(
        self, token_ids: Sequence[int], options: Options | None = None
    ) -> AsyncIterator[TokenOutput]:
        """Submit a request and yield its outputs; closing the generator early cancels the request.

        Raises:
            LocalProtocolError: `start` was not called.
            WireError: The request failed or was cancelled by `cancel`.
        """
        if self._thread is None:
            raise LocalProtocolError("start the engine's thread first: nothing would ever come")
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[TokenOutput] = asyncio.Queue()

        def deliver(output: TokenOutput) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        request_id = self.submit(token_ids, options, deliver)
        output: TokenOutput | None = None
        try:
            while output is None or not output.is_final:
                output = await outputs.get()
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if output is None or not output.is_final:
                self.cancel(request_id)

    def metrics(self) -> ServingMetrics:
        ends = self._ledger.ends
        return ServingMetrics(
            submitted=sum(ends.values()) + self._ledger.num_open,
            completed=ends["stop"] + ends["length"],
            cancelled=ends["cancelled"],
            failed=ends["error"],
            prompt_tokens=self._ledger.num_prompt_tokens,
            completion_tokens=self._ledger.num_tokens,
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            load=self._engine.load(),
            executor=self._executor.metrics(),
            status=self._executor.status(),
        )

    def slots(self) -> Slots:
        """Return the running requests with their progress and speed."""
        return self._engine.slots()

    def _post(self, call: Callable[[Engine], object]) -> None:
        if self._thread is not None:
            self._thread.post(call)
        else:
            with self._crashing():
                call(self._engine)

    # Called on the thread that runs the engine steps.

    def _deliver(self, outputs: list[Output]) -> list[TokenOutput]:
        delivered: list[TokenOutput | None] = []
        for output in outputs:
            match output:
                case Token():
                    delivered.append(self._ledger.on_token(output))
                case Failed(request_id, code, message):
                    error = WireError(code, message)
                    delivered.append(self._ledger.end(request_id, "error", error))
        return [output for output in delivered if output is not None]

    @contextmanager
    def _crashing(self) -> Iterator[None]:
        """End every request with an error if the engine raises on the caller's thread."""
        try:
            yield
        except BaseException as error:
            self._crash(error)
            raise

    def _crash(self, error: BaseException) -> None:
        broken = WireError(ErrorCode.INTERNAL, f"the engine broke: {error!r}")
        broken.__cause__ = error
        self._ledger.close("error", broken)
