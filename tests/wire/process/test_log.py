"""Logs are lines for machines or people, and nobody waits for them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import structlog

from wire.process.log import MAX_TRACES, LogWriter, bind_trace, configure

LONG_S = 60  # for what happens at once


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(
    write: Callable[[], None], level: str = "info", *, is_terminal: bool = False
) -> list[str]:
    stream = io.StringIO()
    writer = configure(level, stream, is_terminal=is_terminal)
    write()
    writer.close(LONG_S)
    return stream.getvalue().splitlines()


def test_a_line_for_machines_is_json_with_what_is_bound() -> None:
    def write() -> None:
        with structlog.contextvars.bound_contextvars(request=7):
            structlog.get_logger("router.app").info("placed", rank=3, peer=b"decode-3-1")

    (line,) = logged(write)
    event = json.loads(line)
    assert event["event"] == "placed"
    assert (event["level"], event["logger"]) == ("info", "router.app")
    assert (event["request"], event["rank"]) == (7, 3)
    assert event["timestamp"].endswith("Z")


def test_lines_of_a_request_have_its_trace_and_others_have_none() -> None:
    def write() -> None:
        log = structlog.get_logger("worker")
        bind_trace(7, "a" * 32)
        bind_trace(8, None)
        log.info("failed", request=7)
        log.info("failed", request=8)
        log.info("draining", request="7")
        for number in range(MAX_TRACES):
            bind_trace(100 + number, "b" * 32)
        log.info("failed", request=7)

    traces = [json.loads(line).get("trace_id") for line in logged(write)]
    assert traces == ["a" * 32, None, None, None], "only the latest are kept"


def test_all_lines_of_a_worker_have_its_name() -> None:
    stream = io.StringIO()
    writer = configure("info", stream, worker="decode-3")
    structlog.get_logger("worker").info("loading")
    logging.getLogger("library").warning("slow")
    writer.close(LONG_S)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["worker"] for line in lines] == ["decode-3", "decode-3"]


def test_the_standard_library_ends_in_the_same_place() -> None:
    def write() -> None:
        with structlog.contextvars.bound_contextvars(request=7):
            logging.getLogger("some.library").warning("port %d is busy", 80)

    event = json.loads(logged(write)[0])
    assert (event["event"], event["level"]) == ("port 80 is busy", "warning")
    assert (event["logger"], event["request"]) == ("some.library", 7)


def test_a_line_for_people_is_text() -> None:
    (line,) = logged(lambda: structlog.get_logger("worker").info("ready", rank=3), is_terminal=True)
    assert "ready" in line and "rank" in line
    with pytest.raises(ValueError):
        json.loads(line)


def test_an_exception_is_one_json_line_with_its_frames() -> None:
    def write() -> None:
        try:
            raise RuntimeError("broken")
        except RuntimeError:
            structlog.get_logger("worker").exception("step failed")
            logging.getLogger("other").exception("so did this")

    for line in logged(write):
        event = json.loads(line)
        (fault,) = event["exception"]
        assert (fault["exc_type"], event["level"]) == ("RuntimeError", "error")
        assert [frame["name"] for frame in fault["frames"]] == ["write"]
        assert "exc_info" not in event


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_exception_shows_no_values(is_terminal: bool) -> None:
    def fail(prompt: str) -> None:
        raise ValueError(f"cannot read {prompt}")

    def write() -> None:
        try:
            fail("SEC" + "RET")
        except ValueError as error:
            structlog.get_logger("worker").exception("step failed")
            structlog.get_logger("worker").warning("step failed", exc_info=error)
            logging.getLogger("other").exception("so did this")

    lines = "\n".join(logged(write, is_terminal=is_terminal))
    assert lines.count("ValueError") >= 3 and lines.count(__file__) == 6
    assert "SECRET" not in lines


def test_lines_below_the_level_are_not_written() -> None:
    def write() -> None:
        structlog.get_logger().debug("no")
        structlog.get_logger().info("no")
        logging.getLogger("x").info("no")
        structlog.get_logger().warning("yes")

    assert [json.loads(line)["event"] for line in logged(write, "warning")] == ["yes"]


def test_a_record_that_cannot_be_formatted_is_counted() -> None:
    writer = configure("info", io.StringIO())
    logging.getLogger("x").info("%d", "not a number")
    writer.close(LONG_S)
    assert writer.num_dropped == 1


class StalledStream(io.StringIO):
    """A reader that takes nothing until released, as a full pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stalled = threading.Event()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        self.is_stalled.set()
        self.released.wait()
        return super().write(text)


def test_a_stalled_reader_costs_lines_and_no_time() -> None:
    stream = StalledStream()
    writer = LogWriter(stream, max_lines=10)
    writer.put("first")
    stream.is_stalled.wait()
    for i in range(100):
        writer.put(f"line {i}")
    assert writer.num_dropped == 90
    writer.close(timeout_s=0.01)  # the queue is full: give up
    stream.released.set()
    writer.close(LONG_S)
    assert stream.getvalue().splitlines() == ["first", *(f"line {i}" for i in range(10))]


def test_dropped_lines_are_reported_when_the_reader_is_back() -> None:
    stream = StalledStream()
    writer = configure("info", stream)
    log = structlog.get_logger("x")
    log.info("first")
    stream.is_stalled.wait()
    while writer.num_dropped < 3:
        log.info("flood")
    stream.released.set()
    writer.close(LONG_S)
    writer.close()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    reports = [event for event in events if event["event"] == "log lines dropped"]
    assert [report["count"] for report in reports] == [3]


def test_lost_lines_are_not_reported_to_a_closed_pipe() -> None:
    """Each such line was lost too, and the next said so: that kept a core busy for ever."""
    reader, writer_fd = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer_fd, "w")
    writer = configure("info", stream, is_terminal=False)
    for number in range(3):
        structlog.get_logger().info("to nobody")
        while writer.num_dropped == number:
            time.sleep(0.001)
    writer.close(LONG_S)
    assert writer.num_dropped == 4, "three, and at the end the line that says so"
    with contextlib.suppress(BrokenPipeError):
        stream.close()
