"""Whoever asked for a turn has one, once; all prepare before anybody transmits."""

from __future__ import annotations

import asyncio

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
