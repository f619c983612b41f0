"""Which states are kept: never too few for those that run, snapshots as far as there is room."""

import random
from typing import Any

import pytest

from tests.oracle import oracle
from tests.worker.engine.hashed import of_kind, run, text
from wire.options import Options
from worker.compute.state_slots import StateSlots
from worker.engine.engine import Engine
from worker.engine.outputs import Failed
from worker.engine.sequence import Sequence
from worker.engine.states import States
from worker.executor.batch import Batch
from worker.executor.contract import SampledToken, SequenceFailed
from worker.executor.hash import MIXED, HashExecutor, create_mixed

ENDLESS = Options(ignore_eos=True)
BLOCK_SIZE = 4


def engine_of(executor: HashExecutor | None = None, **settings: Any) -> Engine:
    settings = {"num_blocks": 60, "block_size": BLOCK_SIZE} | settings
    return Engine(executor or create_mixed(), **settings)


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return oracle(prompt, num_tokens, ENDLESS, layout=MIXED)


def answer(engine: Engine, request_id: int, prompt: list[int], num_tokens: int = 9) -> int:
    """Check the text of one request; return how many of its tokens were found."""
    found = engine.stats().counters.cached_tokens
    engine.add(Sequence(request_id, prompt, ENDLESS, num_tokens))
    assert text(run(engine), request_id) == expected(prompt, num_tokens)
    return engine.stats().counters.cached_tokens - found


def test_a_state_is_kept_as_long_as_somebody_needs_it() -> None:
    slots = StateSlots(4, BLOCK_SIZE)
    states, table = States(slots), [5, 6, 7]
    states.enter()
    slots.take(table, 4)
    states.hold(5)
    states.keep(5)
    states.release(5)
    assert states.is_kept(5)
    states.prepare([], 4)
    assert not states.is_kept(5) and slots.num_free == 4, "a snapshot gives way"
    slots.take(table, 8)
    states.hold(6)
    states.keep(6)
    states.prepare([(table, 9)], 3)
    assert states.is_kept(6) and slots.has(6, 8), "not while a sequence goes on from it"
    assert slots.has(7, 9), "one that arrives has its slot"
    states.drop(6)
    assert slots.has(6, 8)
    states.leave(6)
    assert slots.has(6, 8), "it may be on its way to host memory"
    states.prepare([], 1)
    assert not slots.has(6, 8)


def test_snapshots_not_used_for_longest_go_first() -> None:
    slots = StateSlots(4, BLOCK_SIZE)
    states = States(slots)
    for block in (1, 2, 3):
        slots.take([block], 4)
        states.keep(block)
    states.hold(1)
    states.release(1)
    states.prepare([], 2)
    assert [states.is_kept(block) for block in (1, 2, 3)] == [True, False, True]


def test_states_for_less_than_one_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="room for 1 states, a sequence needs 2"):
        engine_of(num_states=1)


def test_a_shared_prefix_continues_from_the_last_state_at_a_block_end() -> None:
    engine, prompt = engine_of(), list(range(10, 32))
    assert answer(engine, 1, prompt) == 0
    assert answer(engine, 2, prompt) == 20, "the same prompt"
    assert answer(engine, 3, prompt[:20]) == 0, "16 are known, but no state is there"
    assert answer(engine, 4, prompt[:20]) == 16
    assert answer(engine, 5, [*prompt[:20], 5, 6]) == 20
    told = [*prompt, *expected(prompt, 9)]
    assert answer(engine, 6, [*told, 8, 9]) == 28, "the next turn of a conversation"


class Unlucky(HashExecutor):
    """Its samples fail now and then, each time because of one sequence of several."""

    def __init__(self, seed: int) -> None:
        super().__init__(create_mixed().info)
        self._draw = random.Random(seed)
        self.num_failed = 0

    def sample(self, logits: list[int], batch: Batch) -> list[SampledToken]:
        if len(batch.context_lens) > 1 and self._draw.random() < 0.3:
            self.num_failed += 1
            raise SequenceFailed(self._draw.randrange(len(batch.context_lens)), "bad luck")
        return super().sample(logits, batch)


@pytest.mark.parametrize("seed", range(12))
def test_a_step_that_failed_is_computed_again_from_the_states_before_it(seed: int) -> None:
    executor, draw = Unlucky(seed), random.Random(seed)
    engine = engine_of(
        executor, num_states=draw.choice([12, 14, 40]), max_ubatch_tokens=draw.choice([5, 9, 64])
    )
    prompts = {number: draw.choices(range(9), k=draw.randint(1, 25)) for number in range(6)}
    for number, prompt in prompts.items():
        engine.add(Sequence(number, prompt, ENDLESS, 12))
    outputs = run(engine)
    failed = {output.request_id for output in of_kind(outputs, Failed)}
    assert 0 < len(failed) == executor.num_failed < 6
    for number in prompts.keys() - failed:
        assert text(outputs, number) == expected(prompts[number], 12)
