"""Exceptions in the log; the hooks are tested in a process of their own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import torch

from wire.errors import ErrorCode, WireError
from wire.process.exceptions import MAX_FRAMES, WITHHELD, catch_all, described, printed, text

ROOT = Path(__file__).resolve().parents[3]


def caught(call: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as raised:
        call()
    return raised.value


def of_module(name: str) -> Exception:
    """An error as cupy_backends.cuda.api.runtime.CUDARuntimeError is."""
    kind: type[RuntimeError] = type("DeviceError", (RuntimeError,), {"__module__": name})
    return kind("SECRET")


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (WireError(ErrorCode.OVERLOADED, "SECRET"), True),
        (OSError("SECRET"), True),
        (torch.OutOfMemoryError("SECRET"), True),
        (of_module("cupy_backends.cuda.runtime"), True),
        (of_module("cupyright"), False),
        (ValueError("SECRET"), False),
        (KeyError("SECRET"), False),
        (RuntimeError("SECRET"), False),
    ],
)
def test_only_texts_that_cannot_repeat_a_request_are_kept(error: Exception, is_kept: bool) -> None:
    assert text(error) == ("SECRET" if is_kept else WITHHELD)
    for shown in (json.dumps(described(error)), printed(error)):
        assert ("SECRET" in shown) == is_kept and type(error).__name__ in shown


@pytest.mark.parametrize("bracket", "<({")
def test_values_in_messages_of_the_loop_are_cut(bracket: str) -> None:
    loop = asyncio.new_event_loop()
    handler = sys.excepthook, sys.unraisablehook, threading.excepthook
    try:
        catch_all(loop)
        with structlog.testing.capture_logs() as lines:
            loop.call_exception_handler({"message": f"Exception in f{bracket}SECRET"})
    finally:
        sys.excepthook, sys.unraisablehook, threading.excepthook = handler
        loop.close()
    assert [line["what"].startswith("Exception in f") for line in lines] == [True]
    assert "SECRET" not in str(lines)


def test_causes_and_groups_are_shown_and_their_texts_are_not() -> None:
    def inner(prompt: str) -> None:
        int(prompt)

    def middle() -> None:
        try:
            inner("SECRET")
        except ValueError as error:
            raise OSError("the disk is full") from error

    def outer() -> None:
        try:
            middle()
        except OSError as error:
            raise ExceptionGroup("SECRET", [error, KeyError("SECRET")]) from None

    error = caught(outer)
    (group,) = described(error)
    assert group["exc_type"] == "ExceptionGroup"
    [disk, value], [key] = group["exceptions"]
    assert disk["exc_value"] == "the disk is full" and value["exc_type"] == "ValueError"
    assert [frame["name"] for frame in value["frames"]] == ["middle", "inner"]
    assert key["exc_type"] == "KeyError"
    shown = printed(error)
    assert shown.index("ValueError") < shown.index("OSError: the disk is full")
    for each in (shown, json.dumps(described(error))):
        assert "SECRET" not in each.replace('"SECRET"', "")  # as it stands in this file's source


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert [each["exc_type"] for each in described(first)] == ["ValueError", "KeyError"]


def test_a_deep_recursion_shows_its_innermost_frames() -> None:
    def dig(depth: int) -> None:
        if not depth:
            raise ValueError
        dig(depth - 1)

    (entry,) = described(caught(lambda: dig(2 * MAX_FRAMES)))
    assert len(entry["frames"]) == MAX_FRAMES
    assert {frame["name"] for frame in entry["frames"]} == {"dig"}


PROGRAM = """\
import asyncio, functools, gc, threading
from wire.process.log import configure
from wire.process.lifetime import run
def fail(secret, *_):
    raise ValueError(secret)
async def fail_later(secret):
    fail(secret)
class Doomed:
    def __init__(self, secret):
        self.secret = secret
    def __del__(self):
        fail(self.secret)
class Protocol(asyncio.Protocol):
    def data_received(self, data):
        raise ValueError(data)
async def main(stop):
    loop = asyncio.get_running_loop()
    secret = "SEC" + "RET"
    loop.call_soon(fail, secret)
    loop.call_soon(functools.partial(fail, secret))
    loop.call_later(0, fail, secret)
    task = loop.create_task(fail_later(secret))
    server = await loop.create_server(Protocol, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(secret.encode())
    await reader.read()
    writer.close()
    thread = threading.Thread(target=fail, args=(secret,))
    thread.start(); thread.join()
    Doomed(secret)
    await asyncio.sleep(0)
    del task
    gc.collect()
    return 0
writer = configure("debug")
run(main)
raise ValueError("SEC" + "RET")
"""


def test_uncaught_exceptions_are_logged_without_values() -> None:
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "SECRET" not in done.stderr + done.stdout
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [event["event"] for event in events] == ["not caught"] * 8, done.stderr
    assert {event["exception"][0]["exc_type"] for event in events} == {"ValueError"}
    assert sum("callback" in event.get("what", "") for event in events) == 3
    assert {event["thread"] for event in events if "thread" in event} == {"Thread-1 (fail)"}
    assert [event["where"] for event in events if "where" in event] == ["Doomed.__del__"]
