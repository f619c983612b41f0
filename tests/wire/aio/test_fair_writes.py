"""Each writer writes once in an iteration, and all prepare before one transmits."""

from __future__ import annotations

import asyncio
import time
from itertools import count

import pytest

from wire.aio.fair_writes import FairWrites


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
    turns, story = FairWrites(), list[str]()
    a, b = Speaker("a", story), Speaker("b", story)
    for word in (b"one", b"two"):
        for speaker in (a, b):
            speaker.words.append(word)
            turns.take(speaker)
    assert not story
    await asyncio.sleep(0)
    assert story == ["a prepares", "b prepares", "a says one two", "b says one two"]


@pytest.mark.parametrize(("num_writers", "num_first"), [(128, 128), (129, 128), (2000, 500)])
async def test_very_many_writers_are_served_over_several_iterations(
    num_writers: int, num_first: int
) -> None:
    turns, story = FairWrites(), list[str]()
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


async def test_a_waiting_writer_that_asks_again_keeps_its_place() -> None:
    """Or else whoever has more to say each time would never have a turn."""
    turns, story = FairWrites(), list[str]()
    speakers = [Speaker(str(number), story) for number in range(200)]
    for speaker in speakers:
        turns.take(speaker)
    turns.take(speakers[0])
    await asyncio.sleep(0)
    turns.take(speakers[128])
    await asyncio.sleep(0)
    assert story == [f"{number} prepares" for number in range(200)]


async def test_a_writer_that_asks_while_it_writes_is_served_again() -> None:
    turns, story = FairWrites(), list[str]()

    class Again(Speaker):
        def transmit(self, body: bytes) -> None:
            super().transmit(body)
            if body == b"one":
                self.words.append(b"more")
                turns.take(self)

    speakers = [Again("0", story), *(Speaker(str(number), story) for number in range(1, 200))]
    speakers[0].words.append(b"one")
    for speaker in speakers:
        turns.take(speaker)
    for _ in range(2):
        await asyncio.sleep(0)
    assert story == [
        *[f"{number} prepares" for number in range(128)],
        "0 says one",
        *[f"{number} prepares" for number in [*range(128, 200), 0]],
        "0 says more",
    ]


async def test_writers_of_one_iteration_get_the_same_time() -> None:
    told = list[float]()

    class Timed(Speaker):
        def prepare(self, now: float) -> bytes:
            told.append(now)
            return super().prepare(now)

    ticks = count(7)
    for turns in (FairWrites(lambda: next(ticks)), FairWrites()):
        began = time.monotonic()
        for name in "ab":
            turns.take(Timed(name, []))
        await asyncio.sleep(0)
    assert told[:2] == [7, 7]
    assert told[2] == told[3] and began <= told[2] <= time.monotonic(), "the clock by default"
