"""A step gives its tokens, or says whose fault it is that there are none."""

import pytest

from tests.worker.poisoned import POISON, PoisonedExecutor
from wire.options import Options
from worker.engine.batch import Chunk, build
from worker.engine.sequence import Sequence
from worker.engine.step import compute
from worker.executor.batch import Batch, BatchType
from worker.executor.contract import SequenceFailed
from worker.executor.hash import oracle

GREEDY = Options(ignore_eos=True, prompt_logprobs=1)


def batch_of(*prompts: list[int]) -> tuple[Batch, list[Sequence]]:
    sequences = [Sequence(index, prompt, GREEDY) for index, prompt in enumerate(prompts)]
    for index, sequence in enumerate(sequences):
        sequence.block_table.append(index)
    chunks = [Chunk(sequence, sequence.num_tokens) for sequence in sequences]
    return build(BatchType.PREFILL, chunks, 4), sequences


def test_tokens_and_scores() -> None:
    executor = PoisonedExecutor()
    executor.allocate(4, 4)
    batch, sequences = batch_of([5, 6], [7, 8, 9])
    tokens = compute(executor, batch)
    assert isinstance(tokens, list)
    assert [it.token_id for it in tokens] == [
        *oracle([5, 6], 1, GREEDY),
        *oracle([7, 8, 9], 1, GREEDY),
    ]
    assert [it.scores.num_scored for it in sequences if it.scores is not None] == [1, 2]


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


def test_a_long_reason_is_cut() -> None:
    failure = SequenceFailed(0, "x" * 10_000)
    assert len(failure.message) == len(str(failure)) == SequenceFailed.MAX_MESSAGE
