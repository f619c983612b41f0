"""Writing to one client: when it begins, what keeps it alive, how it ends, and who is cut off."""

from __future__ import annotations

import asyncio

import pytest

from router.api.completions.response import DONE, PING
from router.api.errors import HttpError
from router.http import writer as module
from router.http.asgi import Disconnected
from tests.router.http.client import Client, text_of
from tests.router.site import events, ids
from wire.errors import ErrorCode, WireError
from wire.payloads import PrefillResult, Usage


async def test_a_stream_to_its_end() -> None:
    client = Client()
    client.now = 1.0
    task = client.stream()
    client.say("ab")
    assert text_of(await client.bodies.get()) == "ab"
    client.now = 1.5
    client.say("cd")
    assert text_of(await client.bodies.get()) == "cd"
    client.now = 1.75
    client.say("e")
    assert text_of(await client.bodies.get()) == "e"
    client.sink.on_done(Usage(finish_reason="stop"))
    assert (await client.bodies.get()).endswith(DONE)
    await task
    start, *bodies = client.sent
    assert (start["status"], (b"x", b"y") in start["headers"]) == (200, True)
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert [body["more_body"] for body in bodies] == [True, True, True, False]
    assert client.tokens == [(0.5, 2), (0.25, 1)]


async def test_the_first_token_does_not_wait_for_the_end_of_the_turn() -> None:
    client = Client()
    task = client.stream()
    await asyncio.sleep(0)  # it is ready to write
    client.sink.on_prefill(PrefillResult(token_id=ids("a")[0]), 0)
    assert text_of(client.bodies.get_nowait()) == "a"
    client.say("b")
    assert client.bodies.empty()
    assert text_of(await client.bodies.get()) == "b"
    client.sink.on_done(Usage(finish_reason="stop"))
    await task


async def test_nothing_is_said_before_the_first_token() -> None:
    client = Client()
    task = client.stream()
    client.sink.on_error(WireError(ErrorCode.WORKER_LOST, "gone"))
    with pytest.raises(HttpError) as caught:
        await task
    assert (caught.value.status, client.sent) == (503, [])


async def test_a_failure_in_the_middle_is_said_and_ends_the_body() -> None:
    client = Client()
    task = client.stream()
    client.say("a")
    await client.bodies.get()
    client.say("b")
    client.sink.on_error(WireError(ErrorCode.WORKER_LOST, "gone"))
    token, error = events((await client.bodies.get()).decode())
    assert token["choices"][0]["text"] == "b"
    assert error["error"]["code"] == "worker_lost"
    await task
    assert client.sent[-1]["more_body"] is False


async def test_silence_is_broken_by_a_comment() -> None:
    client = Client()
    task = client.stream()
    client.now = module.PING_S - 1
    client.writer.tick()
    client.now = module.PING_S
    client.writer.tick()
    assert await client.bodies.get() == PING
    assert client.writer.is_started
    client.writer.wake()  # as a token does that is held back: there is nothing to say
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client.bodies.empty()
    client.say("a")
    assert text_of(await client.bodies.get()) == "a"
    client.writer.disconnect()
    with pytest.raises(Disconnected):
        await task


async def test_a_client_that_leaves() -> None:
    client = Client()
    task = client.stream()
    await asyncio.sleep(0)
    client.writer.disconnect()
    client.say("a")
    with pytest.raises(Disconnected):
        await task
    await asyncio.sleep(0)
    assert client.sent == []


async def test_tokens_that_pile_up_cut_a_blocked_write_only() -> None:
    client = Client()
    client.writer.overrun()
    assert not client.cuts
    client.may_write.clear()
    task = client.stream()
    client.say("a")
    await client.is_writing.wait()
    client.writer.overrun()
    client.writer.overrun()
    assert client.cuts == [client]
    client.may_write.set()
    with pytest.raises(Disconnected):
        await task
