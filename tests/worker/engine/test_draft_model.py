"""A model drafts for another: with an equal model every draft is right, blocks are conserved."""

import random
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from scripts.models.make_model import make_model
from tests.oracle import oracle
from tests.worker.engine.hashed import GREEDY, run, text
from tests.worker.poisoned import POISON, PoisonedExecutor
from tests.worker.workload import MAX_MODEL_LEN, VOCAB_SIZE, full_text, hash_executor
from wire.options import Options
from worker.engine.draft_model import ModelDrafter
from worker.engine.engine import Engine
from worker.engine.sequence import MAX_DRAFTS, Sequence
from worker.executor.batch import Batch
from worker.executor.contract import ModelInfo
from worker.executor.hash import LAYOUT, HashExecutor, create
from worker.executor.torch import TorchExecutor


def drafter(num_blocks: int = 40, num_drafts: int = 3, max_ubatch_tokens: int = 64) -> ModelDrafter:
    return ModelDrafter(
        hash_executor(),
        num_drafts,
        num_blocks=num_blocks,
        block_size=3,
        max_ubatch_tokens=max_ubatch_tokens,
    )


def test_a_wrong_draft_is_cut_off_and_forgotten() -> None:
    executor = SizingExecutor()
    model = ModelDrafter(executor, 3, num_blocks=40, block_size=3)
    sequence = Sequence(1, [3, 4, 5], GREEDY)
    (drafts,) = model.draft([sequence], [3])
    sequence.token_ids += [drafts[0], (drafts[1] + 1) % VOCAB_SIZE]
    assert tuple(model.draft([sequence], [3])[0]) == full_text(tuple(sequence.token_ids), 3, GREEDY)
    assert executor.sizes == [3, 1, 1, 1, 1, 1], "what was right is not computed again"
    model.check()
    model.forget(1)
    model.forget(1)
    assert model.pool.num_used == 0


class SizingExecutor(HashExecutor):
    """The hash executor, remembering how many tokens its batches had."""

    def __init__(self) -> None:
        super().__init__(hash_executor().info)
        self.sizes: list[int] = []

    def forward(self, batch: Batch) -> list[int]:
        self.sizes.append(len(batch.token_ids))
        return super().forward(batch)


def test_a_long_prompt_is_read_over_many_rounds_and_nobody_waits_for_it() -> None:
    executor = SizingExecutor()
    model = ModelDrafter(executor, 3, num_blocks=40, block_size=3, max_ubatch_tokens=8)
    long, short = Sequence(1, [3, 4, 5] * 10, GREEDY), Sequence(2, [3, 4], GREEDY)
    for wanted in ([0, 3], [0, 3], [0, 3], [0, 3], [0, 3], [3, 3]):
        executor.sizes.clear()
        drafts = model.draft([long, short], [3, 3])
        assert [len(drafted) for drafted in drafts] == wanted
        assert len(executor.sizes) == 3, "a batch for each draft, whatever is read"
        assert executor.sizes[0] <= 8
        for sequence, drafted in zip([long, short], drafts, strict=True):
            text = tuple(sequence.token_ids)
            assert tuple(drafted) == full_text(text, len(drafted), GREEDY)
            sequence.token_ids += full_text(text, len(drafted) + 1, GREEDY)
    model.check()


@pytest.mark.parametrize("place", ["forward", "sample"])
def test_a_sequence_that_fails_the_draft_model_gets_no_drafts(place: str) -> None:
    model = ModelDrafter(PoisonedExecutor(place), 3, num_blocks=40, block_size=3)
    engine = Engine(create(), num_blocks=40, block_size=3, speculate=model)
    prompts = [[3, 4, 5], [6, POISON, 7], [8, 9]]
    with capture_logs() as logs:
        for number, prompt in enumerate(prompts):
            engine.add(Sequence(number, prompt, GREEDY, 12))
        outputs = run(engine)
    for number, prompt in enumerate(prompts):
        assert text(outputs, number) == oracle(prompt, 12, GREEDY)
    failures = [line for line in logs if line["event"] == "the draft model failed"]
    assert [line["request"] for line in failures] == [1]
    assert engine.counters.accepted_tokens > 10
    model.check()
    assert model.pool.num_used == 0
    (drafts,) = model.draft([Sequence(1, [8, 9], GREEDY)], [3])
    assert drafts, "another sequence of its number is nothing like it"


def test_without_room_there_are_no_drafts() -> None:
    model = drafter(num_blocks=3)
    sequences = [Sequence(1, [3] * 6, GREEDY), Sequence(2, [4] * 6, GREEDY)]
    drafts = model.draft(sequences, [3, 3])
    assert [len(drafted) for drafted in drafts] == [3, 0]
    assert model.draft(sequences, [0, 0]) == [[], []]
    model.check()


def test_nothing_is_drafted_beyond_the_context_of_the_draft_model() -> None:
    model = drafter()
    lengths = (MAX_MODEL_LEN - 2, MAX_MODEL_LEN, MAX_MODEL_LEN + 5)
    sequences = [Sequence(n, [3] * n, GREEDY) for n in lengths]
    assert [len(drafted) for drafted in model.draft(sequences, [3] * 3)] == [2, 0, 0]


@pytest.mark.parametrize("num_drafts", [0, MAX_DRAFTS + 1])
def test_no_drafts_or_too_many_are_a_mistake(num_drafts: int) -> None:
    with pytest.raises(ValueError, match=f"num_drafts is {num_drafts}, not between 1 and 64"):
        drafter(num_drafts=num_drafts)


@pytest.mark.parametrize("eos_token_ids", [frozenset({2}), frozenset({3, 4})])
def test_the_engine_s_text_is_the_target_s(eos_token_ids: frozenset[int]) -> None:
    """With the same model all drafts are right, with another one some."""
    info = ModelInfo("draft", "draft", VOCAB_SIZE, MAX_MODEL_LEN, eos_token_ids, LAYOUT)
    model = ModelDrafter(HashExecutor(info), 3, num_blocks=40, block_size=3)
    engine = Engine(hash_executor(), num_blocks=40, block_size=4, speculate=model)
    for request_id in range(3):
        engine.add(Sequence(request_id, [3, 4, request_id], GREEDY, 30))
    outputs = run(engine)
    for request_id in range(3):
        assert tuple(text(outputs, request_id)) == full_text((3, 4, request_id), 30, GREEDY)
    counters = engine.stats().counters
    if eos_token_ids == {2}:
        assert counters.accepted_tokens == counters.drafted_tokens > 0
    else:
        assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert model.pool.num_used == 0 and counters.draft_s > 0


REPEATING = Options(ignore_eos=True, repetition_penalty=1.5)
SHARP = Options(
    ignore_eos=True,
    temperature=0.8,
    seed=1,
    logprobs=1,
    prompt_logprobs=1,
    frequency_penalty=1.5,
    presence_penalty=1.0,
)


@pytest.mark.parametrize("options", [REPEATING, SHARP])
def test_an_equal_model_is_right_with_penalties_too(tmp_path: Path, options: Options) -> None:
    path = make_model(tmp_path)
    target, draft = (
        TorchExecutor.load(path, name="tiny", device="cpu", dtype="float32") for _ in range(2)
    )
    model = ModelDrafter(draft, 3, num_blocks=64)
    engine = Engine(target, num_blocks=128, block_size=4, speculate=model)
    draw = random.Random(3)
    for request_id in range(3):
        prompt = [draw.randrange(3, 256) for _ in range(20)]
        engine.add(Sequence(request_id, prompt, options, 25))
    run(engine)
    counters = engine.stats().counters
    assert counters.accepted_tokens == counters.drafted_tokens > 0
