"""A step tells its plan, computes its tokens or says whose failure it was, and commits them."""

from __future__ import annotations

import pytest

from tests.worker.poisoned import POISON, PoisonedExecutor
from wire.errors import ErrorCode
from wire.options import Options
from worker.engine.batch import Chunk, build
from worker.engine.blocks import BlockPool
from worker.engine.outputs import Failed, Output, Reserved, Started, Token
from worker.engine.scheduler import Plan
from worker.engine.sequence import Sequence, Status
from worker.engine.stats import Counters
from worker.engine.step import commit, compute, report
from worker.executor.batch import Batch, BatchType
from worker.executor.contract import SampledToken, SequenceFailed

GREEDY = Options(ignore_eos=True, prompt_logprobs=1)


def batch_of(*prompts: list[int]) -> tuple[Batch, list[Sequence]]:
    sequences = [Sequence(index, prompt, GREEDY) for index, prompt in enumerate(prompts)]
    for index, sequence in enumerate(sequences):
        sequence.block_table.append(index)
    chunks = [Chunk(sequence, sequence.num_tokens) for sequence in sequences]
    return build(BatchType.PREFILL, chunks, 4), sequences


@pytest.mark.parametrize("place", ["forward", "sample", "score"])
def test_the_sequence_at_fault_is_named_and_no_score_is_kept(place: str) -> None:
    executor = PoisonedExecutor(place)
    executor.allocate(4, 4)
    batch, sequences = batch_of([5, 6], [7, POISON, 9])
    failure = compute(executor, batch)
    assert isinstance(failure, SequenceFailed)
    assert (failure.index, failure.message) == (1, "token 13 is too much")
    assert [it.scores.num_scored for it in sequences if it.scores is not None] == [0, 0]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_sequence_that_there_is_not_is_a_bug(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise SequenceFailed(index, "not me")

    executor = PoisonedExecutor()
    executor.allocate(4, 4)
    monkeypatch.setattr(executor, "forward", broken)
    with pytest.raises(SequenceFailed, match="not me"):
        compute(executor, batch_of([5], [6])[0])


def test_a_plan_is_told() -> None:
    started, reserved = Sequence(1, [5] * 4), Sequence(2, [5] * 4)
    started.block_table.extend([3])
    failed, overdue = Sequence(3, [5] * 40), Sequence(4, [5], Options(deadline_ms=20))
    plan = Plan(started=[started], reserved=[reserved], failed=[failed], overdue=[overdue])
    outputs = report(plan, BlockPool(8, 4))
    assert outputs[:2] == [Started(1, (3,), 0), Reserved(2, (), 0)]
    codes = [(o.request_id, o.code) for o in outputs if isinstance(o, Failed)]
    assert codes == [(3, ErrorCode.OUT_OF_BLOCKS), (4, ErrorCode.DEADLINE_EXCEEDED)]


IGNORE_EOS = Options(ignore_eos=True)


class Step:
    """A pool with blocks of 4, and what `commit` made of a step."""

    def __init__(self) -> None:
        self.pool = BlockPool(16, 4)
        self.counters = Counters()
        self.outputs: list[Output] = []
        self.ended: list[Sequence] = []

    def sequence(
        self, num_tokens: int, computed: int, limit: int = 50, *, transfer: bool = False
    ) -> Sequence:
        prompt = list(range(num_tokens))
        it = Sequence(1, prompt, IGNORE_EOS, limit, transfer=transfer, status=Status.RUNNING)
        it.block_table.extend(self.pool.allocate(4))
        it.num_computed_tokens = computed
        return it

    def commit(self, chunk: Chunk, *token_ids: int) -> list[int]:
        """Return the ids of the tokens told."""
        drawn = [SampledToken(token_id) for token_id in token_ids]
        self.outputs, self.ended = commit([chunk], drawn, self.pool, self.counters)
        return [it.token_id for it in self.outputs if isinstance(it, Token)]


def test_accepted_drafts_have_kv_and_the_rest_gives_back_its_blocks() -> None:
    step = Step()
    sequence = step.sequence(7, 6)
    sequence.drafts = (50, 51, 52, 53, 54, 55)
    assert step.commit(Chunk(sequence, 1, sequence.drafts), 50, 51, 9, 9, 9, 9, 9) == [50, 51, 9]
    assert sequence.num_computed_tokens == 9 and sequence.num_tokens == 10
    assert sequence.num_registered_blocks == 2 and len(sequence.block_table) == 3
    assert not sequence.drafts and sequence.draft_window == 3
    counters = step.counters
    assert (counters.decode_tokens, counters.drafted_tokens, counters.accepted_tokens) == (3, 6, 2)


def test_nothing_follows_the_last_token_though_drafts_were_right() -> None:
    step = Step()
    sequence = step.sequence(7, 6, limit=2)
    assert step.commit(Chunk(sequence, 1, (50, 51)), 50, 51, 52) == [50, 51]
    last = step.outputs[-1]
    assert isinstance(last, Token) and last.finish_reason == "length"
    assert step.ended == [sequence] and sequence.num_computed_tokens == 8
    assert sequence.num_registered_blocks == 2, "the next request finds the drafts' KV as well"
