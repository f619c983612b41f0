"""The stories are told the same for one seed, never cross the split, and answer their questions."""

from random import Random

import pytest

from scripts.models import stories
from scripts.models.stories import Split, Story

SPLITS: tuple[Split, ...] = ("train", "held_out")
NUM_STORIES = 100


def tell(seed: int, split: Split = "train") -> list[Story]:
    rng = Random(seed)
    return [stories.make_story(rng, split) for _ in range(NUM_STORIES)]


def pairs(told: list[Story]) -> set[tuple[str, str]]:
    return {pair for story in told for person in story.cast for pair in person.pairs()}


def test_the_split_is_decided_by_the_pair() -> None:
    assert not any(stories.is_held_out(*pair) for pair in pairs(tell(2, "train")))
    assert all(stories.is_held_out(*pair) for pair in pairs(tell(2, "held_out")))


def test_every_name_has_things_and_places_in_both_splits() -> None:
    for name in stories.NAMES:
        for pool in (stories.THINGS, stories.PLACES):
            held_out = [choice for choice in pool if stories.is_held_out(name, choice)]
            assert 0 < len(held_out) < len(pool) / 2, name


@pytest.mark.parametrize("split", SPLITS)
def test_the_story_holds_every_fact_and_every_answer(split: Split) -> None:
    for story in tell(3, split):
        for fact in story.facts:
            assert fact.sentence in story.text
        for question in story.questions:
            assert question.recalled in story.text
            assert question.recalled in question.answer
            assert question.word not in question.text.strip("?").split()


def test_people_share_neither_names_nor_things() -> None:
    rng = Random(8)
    for split in SPLITS:
        for _ in range(NUM_STORIES):
            people = stories.make_cast(rng, 8, split)
            assert len({person.name for person in people}) == 8
            assert len({person.thing for person in people}) == 8
            assert all(person.home != person.spot for person in people)


def test_a_chat_alternates_and_ends_with_the_assistant() -> None:
    rng = Random(7)
    for story in tell(7):
        for turns in (
            stories.chat_recall(rng, [story], 3),
            stories.chat_telling(rng, story, 2),
            stories.chat_small_talk(rng),
        ):
            spoken = [turn.role for turn in turns if turn.role != "system"]
            assert spoken == ["user", "assistant"] * (len(spoken) // 2)
            assert [turn.role for turn in turns[1:]].count("system") == 0


@pytest.mark.parametrize("num_stories", [1, 3])
def test_recall_cases_are_held_out_questions_about_their_prompt(num_stories: int) -> None:
    cases = list(stories.recall_cases(50, seed=9, num_stories=num_stories))
    assert cases == list(stories.recall_cases(50, seed=9, num_stories=num_stories))
    for case in cases:
        (message,) = case.messages
        assert message.role == "user"
        assert case.word in message.content
        assert case.prompt.endswith("\nAnswer:")
        assert case.prompt.count("\n\n") == num_stories - 1


def test_an_answer_counts_by_the_word_in_its_first_sentence() -> None:
    case = stories.RecallCase(messages=(), prompt="", word="bridge")
    assert case.is_answered_by(" Mia hid the lantern under the bridge.")
    assert not case.is_answered_by("Mia hid the lantern. It was under the bridge.")
    assert not case.is_answered_by("Mia hid the lantern under the bridges.")
    assert not case.is_answered_by("")
