"""A model guesses for another: with an equal model every guess is right, blocks are conserved."""

import pytest

from tests.worker.test_engine import GREEDY, run, text
from tests.worker.workload import MAX_MODEL_LEN, VOCAB_SIZE, full_text, hash_executor
from wire.options import Options
from worker.draft_model import ModelDrafter
from worker.engine import Engine
from worker.executor.contract import ModelInfo
from worker.executor.hash import LAYOUT, HashExecutor
from worker.sequence import Sequence


def drafter(num_blocks: int = 40, num_drafts: int = 3, max_ubatch_tokens: int = 8) -> ModelDrafter:
    return ModelDrafter(
        hash_executor(),
        num_drafts,
        num_blocks=num_blocks,
        block_size=3,
        max_ubatch_tokens=max_ubatch_tokens,
    )


@pytest.mark.parametrize("options", [GREEDY, Options(ignore_eos=True, temperature=1.0, seed=4)])
def test_it_guesses_what_its_model_would_say(options: Options) -> None:
    model = drafter()
    sequences = [Sequence(1, [3, 4, 5] * 4, options), Sequence(2, [3], options)]
    drafts = model.draft(sequences, [9, 2])
    assert [tuple(guesses) for guesses in drafts] == [
        full_text((3, 4, 5) * 4, 3, options),
        full_text((3,), 2, options),
    ]


def test_a_wrong_guess_is_cut_off_and_forgotten() -> None:
    model = drafter()
    sequence = Sequence(1, [3, 4, 5], GREEDY)
    (guesses,) = model.draft([sequence], [3])
    sequence.token_ids += [guesses[0], (guesses[1] + 1) % VOCAB_SIZE]
    assert tuple(model.draft([sequence], [3])[0]) == full_text(tuple(sequence.token_ids), 3, GREEDY)
    assert model._shadows[1].num_computed_tokens == 5 + 2
    model.check()
    model.forget(1)
    model.forget(1)
    assert model.pool.num_used == 0


def test_without_room_there_are_no_guesses() -> None:
    model = drafter(num_blocks=3)
    sequences = [Sequence(1, [3] * 6, GREEDY), Sequence(2, [4] * 6, GREEDY)]
    drafts = model.draft(sequences, [3, 3])
    assert [len(guesses) for guesses in drafts] == [3, 0]
    assert model.draft(sequences, [0, 0]) == [[], []]
    model.check()


def test_nothing_is_guessed_beyond_the_context_of_the_draft_model() -> None:
    model = drafter()
    lengths = (MAX_MODEL_LEN - 2, MAX_MODEL_LEN, MAX_MODEL_LEN + 5)
    sequences = [Sequence(n, [3] * n, GREEDY) for n in lengths]
    assert [len(guesses) for guesses in model.draft(sequences, [3] * 3)] == [2, 0, 0]


def test_no_guesses_asked_for_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="0 drafts"):
        drafter(num_drafts=0)


@pytest.mark.parametrize("eos_token_ids", [frozenset({2}), frozenset({3, 4})])
def test_the_engine_s_text_is_the_target_s(eos_token_ids: frozenset[int]) -> None:
    """With the same model all guesses are right, with another one some."""
    info = ModelInfo("draft", "draft", VOCAB_SIZE, MAX_MODEL_LEN, eos_token_ids, LAYOUT)
    model = ModelDrafter(HashExecutor(info), 3, num_blocks=40, block_size=3)
    engine = Engine(hash_executor(), num_blocks=40, block_size=4, speculate=model)
    for request_id in range(3):
        engine.add(Sequence(request_id, [3, 4, request_id], GREEDY, 30))
    outputs = run(engine)
    for request_id in range(3):
        assert tuple(text(outputs, request_id)) == full_text((3, 4, request_id), 30, GREEDY)
    rate = engine.stats().acceptance_rate
    assert rate == 1.0 if eos_token_ids == {2} else 0 < rate < 1
    assert model.pool.num_used == 0 and engine.stats().counters.draft_s > 0
