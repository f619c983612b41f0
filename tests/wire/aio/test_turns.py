"""Whoever asked for a turn has one, once; all prepare before anybody transmits."""

from __future__ import annotations

import asyncio

import pytest

from wire.aio.turns import Turns


class Speaker:
    """Says what it was given, and writes down when."""

    def __init__(self, name: str, story: list[str]) -> None:
        self._name, self._story = name, story
        self.words: list[bytes] = []

    def prepare(self, now: float) -> bytes:
        self._story.append(f"{self._name} prepares")
        said, self.words = b" ".join(self.words), []
        return said

    def transmit(self, body: bytes) -> None:
        self._story.append(f"{self._name} says {body.decode()}")


async def test_all_prepare_before_anybody_transmits() -> None:
    turns, story = Turns(), list[str]()
    a, b = Speaker("a", story), Speaker("b", story)
    for word in (b"one", b"two"):
        for speaker in (a, b):
            speaker.words.append(word)
            turns.take(speaker)
    assert not story
    await asyncio.sleep(0)
    assert story == ["a prepares", "b prepares", "a says one two", "b says one two"]


async def test_who_has_nothing_to_say_transmits_nothing() -> None:
    turns, story = Turns(), list[str]()
    turns.take(Speaker("a", story))
    await asyncio.sleep(0)
    assert story == ["a prepares"]


async def test_who_asks_in_a_turn_has_the_next_one() -> None:
    turns, story = Turns(), list[str]()

    class Again(Speaker):
        def transmit(self, body: bytes) -> None:
            super().transmit(body)
            self.words.append(b"more")
            turns.take(self)

    speaker = Again("a", story)
    speaker.words.append(b"one")
    turns.take(speaker)
    await asyncio.sleep(0)
    assert story == ["a prepares", "a says one"]
    await asyncio.sleep(0)
    assert story[2:] == ["a prepares", "a says more"]


@pytest.mark.parametrize(("num_writers", "num_first"), [(128, 128), (129, 128), (2000, 500)])
async def test_very_many_divide_into_turns_between_which_others_have_theirs(
    num_writers: int, num_first: int
) -> None:
    turns, story = Turns(), list[str]()
    for number in range(num_writers):
        speaker = Speaker(str(number), story)
        speaker.words.append(b"one")
        turns.take(speaker)
    await asyncio.sleep(0)
    assert story == [
        *[f"{number} prepares" for number in range(num_first)],
        *[f"{number} says one" for number in range(num_first)],
    ]
    while len(story) < 2 * num_writers:
        before = len(story)
        await asyncio.sleep(0)
        assert before < len(story) <= before + 2 * num_first
    assert len(set(story)) == 2 * num_writers


async def test_who_asks_again_comes_after_those_that_have_waited() -> None:
    turns, story = Turns(), list[str]()
    speakers = [Speaker(str(number), story) for number in range(200)]
    for speaker in speakers:
        turns.take(speaker)
    await asyncio.sleep(0)
    turns.take(speakers[0])
    await asyncio.sleep(0)
    assert story == [f"{number} prepares" for number in [*range(200), 0]]
