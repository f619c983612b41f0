"""The engine on the hash executor: its text equals the oracle's, its blocks are conserved."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from tests.oracle import oracle
from tests.worker.engine.hashed import (
    GREEDY,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    RecordingExecutor,
    engine_of,
    of_kind,
    run,
    text,
)
from wire.errors import ErrorCode
from wire.options import Options, Structure
from wire.process.structured_output import StructureError
from worker.engine.engine import Engine
from worker.engine.outputs import Computed, Failed, Output, Reserved, Started, Token
from worker.engine.sequence import Sequence
from worker.executor.batch import Batch, BatchType
from worker.executor.structured_output import Structured


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return oracle(prompt, num_tokens, GREEDY, VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


def test_a_prompt_is_continued_as_the_oracle_says() -> None:
    engine = engine_of()
    engine.add(Sequence(1, range(10, 23), GREEDY, 20))
    outputs = run(engine)
    tokens = of_kind(outputs, Token)
    assert [token.token_id for token in tokens] == expected(list(range(10, 23)), 20)
    assert [token.index for token in tokens] == list(range(20))
    assert [token.finish_reason for token in tokens] == [None] * 19 + ["length"]
    assert outputs[0] == Started(1, outputs[0].block_table, 0)  # type: ignore[union-attr]
    assert not of_kind(outputs, Computed)
    assert engine.load().used == 0 and engine.num_running == engine.num_waiting == 0


def test_preemption_recomputes_and_nobody_can_tell() -> None:
    engine = engine_of(num_blocks=9)
    prompts = {request_id: [request_id] * 9 for request_id in range(3)}
    for request_id, prompt in prompts.items():
        engine.add(Sequence(request_id, prompt, GREEDY, 20))
    outputs = run(engine)
    assert engine.load().preemptions == engine.stats().counters.preemptions > 0
    for request_id, prompt in prompts.items():
        assert text(outputs, request_id) == expected(prompt, 20)
    assert len(of_kind(outputs, Started)) == 3


def test_a_handed_over_prompt_reports_its_chunks_and_keeps_its_blocks() -> None:
    engine = engine_of(max_ubatch_tokens=5)
    engine.add(Sequence(1, range(10, 22), GREEDY, 20, transfer=True))
    outputs = run(engine)
    assert [computed.num_tokens for computed in of_kind(outputs, Computed)] == [5, 10, 12]
    (token,) = of_kind(outputs, Token)
    assert [token.token_id] == expected(list(range(10, 22)), 1) and token.finish_reason is None
    assert engine.load().used == 3 and engine.num_running == 1
    engine.release(1)
    assert not engine.has_work() and engine.load().used == 0
    engine.check()


def test_incomplete_kv_never_enters_the_prefix_cache() -> None:
    engine = engine_of()
    engine.reserve(1, range(12))
    run(engine)
    engine.cancel(1)
    assert engine.load().cached == 0 and engine.load().stored == ()
    engine.reserve(2, range(12))
    assert of_kind(run(engine), Reserved)[0].cached_tokens == 0


def test_the_kv_of_a_reservation_is_shared_when_a_router_has_asked_for_it() -> None:
    engine = engine_of()
    engine.reserve(1, range(9))
    engine.reserve(2, range(9))
    assert [output.request_id for output in of_kind(run(engine), Reserved)] == [1]
    engine.claim(1)
    assert not of_kind(run(engine), Reserved), "asked for, but not here yet"
    engine.begin_decode(1, range(10), GREEDY, 3)
    (second,) = of_kind(run(engine), Reserved)
    assert (second.request_id, second.cached_tokens) == (2, 8)
    engine.check()
    engine.begin_decode(2, range(10), GREEDY, 3)
    run(engine)
    assert engine.load().used == 0


def test_a_halted_sequence_keeps_its_blocks_until_the_cancel() -> None:
    engine = engine_of(max_ubatch_tokens=5)
    engine.add(Sequence(1, range(10, 22), GREEDY, 20, transfer=True))
    engine.step()
    used = engine.load().used
    for _ in range(2):  # the second changes nothing
        engine.halt(1)
        assert not run(engine) and engine.load().used == used == 3
        engine.check()
    engine.cancel(1)
    assert engine.counters.cancelled == 1 and engine.load().used == 0
    engine.halt(1)
    engine.check()


def test_a_deadline_counts_from_when_it_was_asked_for() -> None:
    now = [0.0]
    engine = engine_of(clock=lambda: now[0])
    engine.reserve(1, range(9))
    run(engine)
    now[0] = 1.0
    options = Options(ignore_eos=True, deadline_ms=300)
    engine.begin_decode(1, range(10), options, 40, requested_s=0.8)
    engine.step()
    now[0] = 1.2
    assert [failed.code for failed in of_kind(engine.step(), Failed)] == [
        ErrorCode.DEADLINE_EXCEEDED
    ]


def test_reservations_wait_in_line_without_a_spinning_engine() -> None:
    engine = engine_of(num_blocks=4)
    engine.reserve(1, range(12))
    engine.reserve(2, range(12))
    assert [reserved.request_id for reserved in of_kind(run(engine), Reserved)] == [1]
    assert not engine.has_work() and engine.num_waiting == 1
    engine.cancel(1)
    assert engine.has_work()
    assert [reserved.request_id for reserved in of_kind(run(engine), Reserved)] == [2]


@pytest.mark.parametrize(
    ("sequence", "code"),
    [
        (Sequence(1, []), ErrorCode.INVALID_REQUEST),
        (Sequence(1, [VOCAB_SIZE]), ErrorCode.INVALID_REQUEST),
        (Sequence(1, [-1]), ErrorCode.INVALID_REQUEST),
        (Sequence(1, [5] * MAX_MODEL_LEN), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (Sequence(1, [5] * 33), ErrorCode.OUT_OF_BLOCKS),
    ],
)
def test_an_invalid_request_fails_alone(sequence: Sequence, code: ErrorCode) -> None:
    engine = engine_of(num_blocks=8)
    engine.add(Sequence(2, [5] * 9, GREEDY, 3))
    engine.add(sequence)
    outputs = run(engine)
    (failed,) = of_kind(outputs, Failed)
    assert (failed.request_id, failed.code) == (1, code) and failed.message
    assert text(outputs, 2) == expected([5] * 9, 3)


def test_decoding_an_unknown_reservation_fails() -> None:
    engine = engine_of()
    engine.begin_decode(9, [1, 2], GREEDY, 3)
    assert [failed.code for failed in of_kind(run(engine), Failed)] == [ErrorCode.UNKNOWN_REQUEST]


@pytest.mark.parametrize(
    ("token_ids", "max_new_tokens", "code"),
    [
        ([5] * 6, 3, ErrorCode.INVALID_REQUEST),
        ([6] * 7, 3, ErrorCode.INVALID_REQUEST),
        ([*[5] * 6, VOCAB_SIZE], 3, ErrorCode.INVALID_REQUEST),
        ([5] * 7, 0, ErrorCode.INVALID_REQUEST),
        ([5] * MAX_MODEL_LEN, 3, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ],
)
def test_a_continuation_that_makes_no_sense_frees_its_reservation(
    token_ids: list[int], max_new_tokens: int, code: ErrorCode
) -> None:
    engine = engine_of()
    engine.reserve(1, [5] * 6)
    run(engine)
    engine.begin_decode(1, token_ids, GREEDY, max_new_tokens)
    assert [failed.code for failed in of_kind(run(engine), Failed)] == [code]
    assert engine.load().used == 0 and engine.num_running == 0


def test_a_known_id_is_not_taken_twice() -> None:
    engine = engine_of()
    engine.add(Sequence(1, [5] * 6, GREEDY, 3))
    engine.add(Sequence(1, [6] * 6, GREEDY, 3))
    assert text(run(engine), 1) == expected([5] * 6, 3)


def test_admissions_are_announced_before_the_batch_is_computed() -> None:
    executor = RecordingExecutor()
    engine = engine_of(executor=executor)
    heard: list[tuple[int, Output]] = []
    engine.announce = lambda outputs: heard.extend((len(executor.batches), o) for o in outputs)
    engine.add(Sequence(1, [5] * 6, GREEDY, 3))
    engine.add(Sequence(2, []))
    outputs = run(engine)
    assert [(num_batches, type(output)) for num_batches, output in heard] == [
        (0, Failed),
        (0, Started),
    ]
    assert all(isinstance(output, Token) for output in outputs)


def timed(num_blocks: int = 64, **settings: int) -> tuple[Engine, list[float]]:
    now = [0.0]
    executor = RecordingExecutor()
    return Engine(
        executor,
        num_blocks=num_blocks,
        block_size=4,
        clock=lambda: now[0],
        **settings,
    ), now


def test_a_prompt_goes_on_though_the_share_is_of_a_tenant_that_cannot_begin() -> None:
    engine = engine_of(max_ubatch_tokens=1, max_sbatch_sequences=1)
    for request_id in (0, 1):
        options = Options(ignore_eos=True, tenant=1 - request_id)
        engine.add(Sequence(request_id, [3] * (9 - 5 * request_id), options, 1))
        engine.step()
    assert len(of_kind(run(engine), Token)) == 2


def test_a_deadline_is_work_for_a_stalled_engine() -> None:
    engine, now = timed(num_blocks=4)
    engine.reserve(1, range(12))
    engine.add(Sequence(2, [5] * 9, Options(deadline_ms=100), 4))
    run(engine)
    assert not engine.has_work() and engine.idle_s() == pytest.approx(0.1)
    now[0] = 0.1
    assert engine.has_work() and engine.idle_s() == 0.0
    assert of_kind(run(engine), Failed)[0].request_id == 2
    assert engine.idle_s() is None


def test_capabilities_of_the_executor_limit_the_engine() -> None:
    executor = RecordingExecutor()
    executor.capabilities = replace(
        executor.capabilities, max_batch_sequences=2, continuous_batching=False
    )
    engine = Engine(executor, num_blocks=64, block_size=4)
    assert engine.config.max_sbatch_sequences == 2 and not engine.config.dynamic_batching
    for request_id in range(5):
        engine.add(Sequence(request_id, [5, 6], GREEDY, 4))
    run(engine)
    sizes = [len(batch.context_lens) for batch in executor.batches]
    assert sizes == [2] * 8 + [1] * 4
    assert [batch.kind for batch in executor.batches] == (
        [BatchType.PREFILL] + [BatchType.DECODE] * 3
    ) * 3


class EndsWhenLookedAt(Future[Any]):
    """A compiler that fails right after it has been asked whether it is done."""

    def done(self) -> bool:
        is_done = super().done()
        if not is_done:
            self.set_exception(StructureError("no such grammar"))
        return is_done


class Compiling(RecordingExecutor):
    """Computes what it is given, which must not be what could not be compiled."""

    def structured(
        self, structure: Structure, prompt_len: int, tenant: int = 0, cache_salt: str = ""
    ) -> Structured:
        return Structured(EndsWhenLookedAt(), prompt_len, lambda _: Future())

    def forward(self, batch: Batch) -> list[int]:
        assert not any(it.structured and it.structured.problem for it in batch.samplings)
        return super().forward(batch)


def test_a_grammar_that_fails_at_any_moment_ends_its_sequence_and_no_other() -> None:
    engine = engine_of(executor=Compiling())
    held = Options(max_tokens=4, structure=Structure(kind="regex", text="a"))
    engine.add(Sequence(1, [5, 6, 7], held))
    engine.add(Sequence(2, [5, 6, 8], Options(max_tokens=4, ignore_eos=True)))
    outputs = run(engine)
    [failed] = [output for output in outputs if isinstance(output, Failed)]
    assert (failed.request_id, failed.code) == (1, ErrorCode.INVALID_REQUEST)
    assert "no such grammar" in failed.message
    assert len(text(outputs, 2)) == 4


class SlowMasks(RecordingExecutor):
    """Every mask after the first token is made outside of steps, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Future[Any]] = []

    def structured(
        self, structure: Structure, prompt_len: int, tenant: int = 0, cache_salt: str = ""
    ) -> Structured:
        compiled: Future[Any] = Future()
        compiled.set_result(None)
        structured = Structured(compiled, prompt_len, self._make)
        structured.is_slow = True
        return structured

    def _make(self, _: object) -> Future[Any]:
        self.masks.append(Future())
        return self.masks[-1]


def test_slow_masks_delay_only_their_own_sequence() -> None:
    executor = SlowMasks()
    engine = engine_of(executor=executor)
    slow = Options(max_tokens=3, structure=Structure(kind="regex", text="a*"), ignore_eos=True)
    engine.add(Sequence(1, [5, 6, 7], slow))
    engine.add(Sequence(2, [5, 6, 8], Options(max_tokens=9, ignore_eos=True)))
    outputs: list[Output] = []
    while not any(isinstance(it, Token) and it.finish_reason for it in outputs):
        outputs += engine.step()
    assert len(text(outputs, 2)) == 9 and len(text(outputs, 1)) == 1 and len(executor.masks) == 1
    while engine.has_work():
        outputs += engine.step()
        if not executor.masks[-1].done():
            executor.masks[-1].set_result(None)
    assert text(outputs, 1) == expected([5, 6, 7], 3) and len(executor.masks) == 2


def test_the_end_of_a_sequence_cancels_the_mask_that_is_made_for_it() -> None:
    executor = SlowMasks()
    engine = engine_of(executor=executor)
    engine.add(Sequence(1, [5, 6, 7], Options(structure=Structure(kind="regex", text="a*"))))
    while not executor.masks:
        engine.step()
    engine.cancel(1)
    assert executor.masks[0].cancelled()
    assert run(engine) == [] and engine.load().used == 0
