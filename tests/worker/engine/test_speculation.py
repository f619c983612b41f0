"""Drafts change how fast a text comes, never the text, never its distribution."""

import numpy as np
import pytest

from tests.worker.engine.hashed import GREEDY, engine_of, of_kind, run, text
from tests.worker.workload import Fortune, full_text, hash_executor
from wire.options import Options
from worker.engine.engine import Engine
from worker.engine.outputs import Token
from worker.engine.sequence import MAX_DRAFTS, Sequence
from worker.engine.speculation import NgramDrafter, accepted, create
from worker.executor.contract import SampledToken


def test_a_repeated_ending_is_continued_as_it_was() -> None:
    drafter = NgramDrafter(3)
    sequence = Sequence(1, [1, 2, 3, 4, 5, 6, 9, 2, 3, 4])
    assert drafter.draft([sequence], [8]) == [[5, 6, 9]]
    assert drafter.draft([sequence], [1]) == [[5]]
    sequence.token_ids += [7, 3, 4]
    assert drafter.draft([sequence], [8]) == [[7, 3, 4]], "the latest occurrence"


@pytest.mark.parametrize("token_ids", [[1], [1, 1], [1, 2, 3, 4], [1, 2, 1]])
def test_new_ngrams_are_not_drafted(token_ids: list[int]) -> None:
    assert NgramDrafter(4).draft([Sequence(1, token_ids)], [4]) == [[]]


def continuations(text: list[int], number: int) -> list[list[int]]:
    """Drafts: tokens that followed earlier occurrences of the last three tokens, else of two."""
    for size in (3, 2):
        ends = [e for e in range(size, len(text)) if text[e - size : e] == text[-size:]]
        if ends:
            return [text[end : end + number] for end in ends]
    return [[]]


@pytest.mark.parametrize("vocab_size", [2, 4, 12])
def test_a_draft_follows_the_longest_ending_while_the_text_grows(vocab_size: int) -> None:
    drafter = NgramDrafter(4)
    draw = np.random.default_rng(0)
    sequence = Sequence(1, [1])
    for _ in range(300):
        (draft,) = drafter.draft([sequence], [4])
        assert draft in continuations(sequence.token_ids, 4)
        kept = draft[: draw.integers(5)]  # some drafts are right, from none to all of them
        sequence.token_ids += [*kept, int(draw.integers(vocab_size))]
    drafter.forget(1)
    other = Sequence(1, [7, 8, 9, 7, 8])
    assert drafter.draft([other], [4]) == [[9, 7, 8]], "what it says of another text is its own"


def tokens(*token_ids: int) -> list[SampledToken]:
    return [SampledToken(token_id) for token_id in token_ids]


def test_tokens_count_up_to_the_first_wrong_draft() -> None:
    assert accepted([], tokens(7)) == tokens(7)
    assert accepted([7, 8], tokens(7, 8, 9)) == tokens(7, 8, 9)
    assert accepted([7, 5], tokens(7, 8, 9)) == tokens(7, 8)
    assert accepted([5, 8], tokens(7, 8, 9)) == tokens(7), "what follows a wrong draft is void"


@pytest.mark.parametrize("setting", ["ngram", "ngram:0", f"ngram:{MAX_DRAFTS + 1}", "magic:3"])
def test_an_invalid_speculate_setting_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=r"ngram:K|num_drafts"):
        create(setting)


def fortunate(num_drafts: int = 4, **settings: int) -> Engine:
    return Engine(
        hash_executor(),
        num_blocks=32,
        block_size=4,
        speculate=Fortune(num_drafts),
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "options", [GREEDY, Options(temperature=1.0, seed=3), Options(min_tokens=9)]
)
@pytest.mark.parametrize("num_drafts", [1, 2, 7])
def test_the_text_is_the_plain_one(options: Options, num_drafts: int) -> None:
    engine = fortunate(num_drafts)
    for request_id in range(3):
        engine.add(Sequence(request_id, [3, 4, request_id], options, 30))
    outputs = run(engine)
    for request_id in range(3):
        assert tuple(text(outputs, request_id)) == full_text((3, 4, request_id), 30, options)
        indexes = [o.index for o in of_kind(outputs, Token) if o.request_id == request_id]
        assert indexes == list(range(len(indexes)))
    assert engine.load().used == 0


def test_accepted_drafts_save_steps_and_are_counted() -> None:
    engine = fortunate()
    engine.add(Sequence(1, [3, 4], GREEDY, 25))
    run(engine)
    counters = engine.stats().counters
    assert counters.steps < 20 and counters.decode_tokens == 25
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert counters.accepted_tokens + counters.steps == 25, "a step is a token and its drafts"


def test_a_drafter_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary has 6 tokens, the model's 500"):
        engine_of(speculate=Fortune(2))


# The distribution: the rule of the paper, on the torch sampler.
