"""The middle of a stream is pushed; when anything else comes, the writer goes on without a loss."""

from __future__ import annotations

import asyncio
import sys

from router.api.completions.response import PING
from router.http.writer import PING_S
from tests.router.http.client import Client, text_of
from wire.payloads import Usage


class Pushed:
    """A server's way past ASGI that takes what comes while `is_free`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.is_free = True

    def __call__(self, body: bytes) -> bool:
        if self.is_free:
            self.bodies.append(body)
        return self.is_free

    @property
    def texts(self) -> list[str]:
        return [text_of(body) for body in self.bodies]


async def in_the_middle(max_tokens: int = sys.maxsize) -> tuple[Client, Pushed, asyncio.Task[None]]:
    """A stream that has said "a", "b" and "c", one after the other: with "c" its middle begins."""
    client = Client(push=(push := Pushed()))
    client.sink.max_tokens = max_tokens
    task = client.stream()
    client.say("a")
    assert text_of(await client.bodies.get()) == "a"
    for letter in "bc":
        client.now += 1.0
        client.say(letter)
        await asyncio.sleep(0)
    assert push.texts == ["b", "c"]
    return client, push, task


async def finish(client: Client, task: asyncio.Task[None]) -> str:
    client.sink.on_done(Usage(finish_reason="stop"))
    await task
    return text_of(b"".join(each["body"] for each in client.sent[1:]).partition(b"data: [DONE]")[0])


async def test_tokens_are_pushed_and_timed_until_the_end() -> None:
    client, push, task = await in_the_middle()
    client.now += 0.5
    client.say("de")
    await asyncio.sleep(0)
    assert push.texts == ["b", "c", "de"]
    assert client.tokens == [(1.0, 1), (1.0, 1), (0.5, 2)]
    client.say("f")
    assert await finish(client, task) == "af"


async def test_a_full_buffer_falls_back_to_asgi_until_it_drains() -> None:
    client, push, task = await in_the_middle()
    push.is_free = False
    client.may_write.clear()
    client.is_writing.clear()
    client.say("d")
    await client.is_writing.wait()
    client.say("e")
    await asyncio.sleep(0)
    push.is_free = True
    client.may_write.set()
    assert text_of(await client.bodies.get()) == "d"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for letter in "fg":
        client.say(letter)
        await asyncio.sleep(0)
    assert "".join(push.texts) == "bcefg"
    assert await finish(client, task) == "ad"


async def test_a_silent_fast_path_gets_a_ping() -> None:
    client, push, task = await in_the_middle()
    client.now += PING_S - 1
    client.say("d")
    await asyncio.sleep(0)
    client.now += PING_S - 1
    client.writer.tick()
    await asyncio.sleep(0)
    assert PING not in push.bodies
    client.now += 1
    client.writer.tick()
    await asyncio.sleep(0)
    assert push.bodies[-1] == PING
    client.say("e")
    await asyncio.sleep(0)
    assert text_of(push.bodies[-1]) == "e"
    await finish(client, task)


async def test_the_last_token_waits_for_the_end() -> None:
    client, push, task = await in_the_middle(max_tokens=6)
    client.say("de")
    await asyncio.sleep(0)
    client.say("f")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert push.texts == ["b", "c", "de"]
    assert await finish(client, task) == "af"


async def test_tokens_of_one_iteration_are_one_write() -> None:
    client, push, task = await in_the_middle()
    client.say("d" * 1000 + "e")
    await asyncio.sleep(0)
    assert push.texts == ["b", "c", "d" * 1000 + "e"]
    events = push.bodies[2].removesuffix(b"\n\n").split(b"\n\n")
    assert [text_of(each + b"\n\n") for each in events] == [*"d" * 1000, "e"]
    assert client.tokens[2:] == [(0.0, 1001)]
    assert await finish(client, task) == "a"
