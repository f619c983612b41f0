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
from wire.aio.fair_writes import FairWrites
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


async def test_held_back_text_does_not_delay_the_ping() -> None:
    client = Client()
    task = client.stream()
    client.now = module.PING_S - 1
    client.writer.wake()  # as a token does of which nothing can be said yet
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.now = module.PING_S
    client.writer.tick()
    await asyncio.sleep(0)
    assert client.bodies.get_nowait() == PING
    client.writer.disconnect()
    with pytest.raises(Disconnected):
        await task


async def test_where_tokens_come_no_comment_is_due() -> None:
    client = Client()
    task = client.stream()
    client.now = module.PING_S
    client.writer.tick()
    client.say("a")  # in the turn in which a comment was to go
    assert text_of(await client.bodies.get()) == "a"
    client.now += module.PING_S - 1
    client.writer.tick()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client.bodies.empty()
    client.sink.on_done(Usage(finish_reason="stop"))
    await task


async def test_while_a_write_waits_no_comment_is_due() -> None:
    client = Client()
    client.may_write.clear()
    task = client.stream()
    client.say("a")
    await client.is_writing.wait()
    client.now = module.PING_S
    client.writer.tick()
    client.may_write.set()
    assert text_of(await client.bodies.get()) == "a"
    for _ in range(4):
        await asyncio.sleep(0)
    assert client.bodies.empty()
    client.sink.on_done(Usage(finish_reason="stop"))
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


async def test_a_client_that_read_late_once_is_not_cut_for_it_later() -> None:
    client = Client()
    client.may_write.clear()
    task = client.stream()
    client.say("a")
    await client.is_writing.wait()
    client.may_write.set()
    assert text_of(await client.bodies.get()) == "a"
    client.say("b")
    assert text_of(await client.bodies.get()) == "b"
    client.writer.overrun()
    assert not client.cuts
    client.sink.on_done(Usage(finish_reason="stop"))
    await task


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


async def test_a_whole_answer() -> None:
    client = Client(is_streamed=False)
    task = asyncio.create_task(client.writer.collect(client.completion))
    client.say("abc")
    client.sink.on_done(Usage(finish_reason="length"))
    [piece] = await task
    assert (piece.text, piece.finish_reason) == ("abc", "length")
    assert client.sent == []


async def test_tokens_that_come_while_a_write_waits_go_out_together() -> None:
    client = Client()
    client.may_write.clear()
    task = client.stream()
    client.say("a")
    await client.is_writing.wait()
    for letter in "bcd":
        client.say(letter)
        await asyncio.sleep(0)
    client.may_write.set()
    assert text_of(await client.bodies.get()) == "a"
    assert text_of(await client.bodies.get()) == "bcd"
    client.sink.on_done(Usage(finish_reason="stop"))
    await task


async def test_an_answer_is_over_when_its_last_write_is() -> None:
    client = Client()
    task = client.stream()
    client.say("a")
    await client.bodies.get()
    client.may_write.clear()
    client.is_writing.clear()
    client.sink.on_done(Usage(finish_reason="stop"))
    await client.is_writing.wait()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    client.may_write.set()
    client.writer.disconnect()  # as who has all of it may
    await task
    assert client.sent[-1]["body"].endswith(DONE)


async def test_a_server_that_breaks_ends_its_own_request_only() -> None:
    turns = FairWrites()
    broken, sound = Client(turns=turns), Client(turns=turns)
    broken.breaks = True
    tasks = [broken.stream(), sound.stream()]
    for client in (broken, sound):
        client.say("a")
    with pytest.raises(RuntimeError, match="broke"):
        await tasks[0]
    assert text_of(await sound.bodies.get()) == "a"
    tasks[1].cancel()


async def test_nothing_is_sent_after_what_failed() -> None:
    """Or else the client would miss something, and not see that it does."""
    client = Client()
    task = client.stream()
    await asyncio.sleep(0)  # it is ready to write
    client.writer.fail(RuntimeError("broke"))
    client.say("a")
    with pytest.raises(RuntimeError, match="broke"):
        await task
    assert client.sent == []


async def test_tokens_of_several_choices_are_not_timed() -> None:
    client = Client()
    client.completion.choices *= 2
    task = client.stream()
    for letter in "ab":
        client.say(letter)
        assert text_of(await client.bodies.get()) == letter
    client.sink.on_done(Usage(finish_reason="stop"))
    await task
    assert client.tokens == []


async def test_a_write_that_waits_can_be_interrupted() -> None:
    client = Client()
    client.may_write.clear()
    task = client.stream()
    client.say("a")
    await client.is_writing.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    client.may_write.set()
    assert client.sent == []
