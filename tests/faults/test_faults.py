"""The chaos runner's own eyes: what it must see in a record, and what its relays do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from scripts.bench.pairs import Pairs
from tests.cluster import ROOT, START_S, until
from tests.faults import slow
from tests.faults.checks import problem
from tests.faults.clients import Record
from tests.faults.ports import BLOCK, free_port, kernels_range
from tests.faults.relay import Relays
from wire.options import Options

TEXT = [5, 6, 7, 8]


def record(tokens: list[int], *, finish: str = "", error: str = "") -> Record:
    made = Record([1, 2], Options(ignore_eos=True), len(TEXT), "http")
    made.on_tokens(tokens)
    if finish or error:
        made.on_end(finish=finish, error=error)
    return made


@pytest.mark.parametrize(
    ("tokens", "word"),
    [([5, 5, 6, 7], "doubled"), ([5, 7, 8, 9], "skipped"), ([5, 9, 7, 8], "wrong"), ([5], "1 t")],
)
def test_a_wrong_text_is_seen(tokens: list[int], word: str) -> None:
    assert word in problem(record(tokens, finish="length"), TEXT)


def test_ends_are_counted() -> None:
    assert problem(record(TEXT, finish="length"), TEXT) == ""
    assert "0 ends" in problem(record(TEXT), TEXT)
    twice = record(TEXT, finish="length")
    twice.on_end(error="late")
    assert "2 ends" in problem(twice, TEXT)
    after = record(TEXT[:3], finish="length")
    after.on_tokens([8])
    assert "1 tokens" in problem(after, TEXT)
    assert "finish reason" in problem(record(TEXT, finish="stop"), TEXT)


def test_an_error_is_right_only_where_it_is_allowed_and_after_a_prefix() -> None:
    assert problem(record(TEXT[:2], error="lost"), TEXT) == "lost"
    assert problem(record(TEXT[:2], error="lost"), TEXT, may_fail=True) == ""
    assert "prefix" in problem(record([5, 7], error="lost"), TEXT, may_fail=True)


def test_time_between_tokens_is_entered_for_the_side_that_saw_it() -> None:
    pairs = Pairs()
    for is_tried, gap_s in ((True, 0.3), (False, 0.2)):
        made = record([])
        made.token_s = [10.0, 10.0 + gap_s, 10.0 + 2 * gap_s]
        slow.enter(pairs, [made], is_tried=is_tried)
    ratio = pairs.ratio(0.5)
    assert pairs.size == 2
    assert [ratio.tried_s, ratio.calm_s] == pytest.approx([0.3, 0.2])


def test_a_relay_passes_holds_and_cuts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Relays() as relays:
        relay = relays.add(*server.getsockname())
        with socket.create_connection(("127.0.0.1", relay.port), START_S) as near:
            far, _ = server.accept()
            with far:
                far.settimeout(START_S)
                near.sendall(b"one decode-3-17 ")
                assert far.recv(100) == b"one decode-3-17 "
                relay.is_black_hole = True
                near.sendall(b"two")
                until(lambda: relay.senders() == {"decode-3"}, "it is held")
                relay.is_black_hole = False
                assert far.recv(100) == b"two"
                relay.cut()
                with pytest.raises(ConnectionError):
                    while near.recv(100):
                        pass
                    raise ConnectionResetError  # closed: a reset with nothing unread may say so


def test_two_processes_never_draw_the_same_port() -> None:
    # The other one begins to look where we did.
    code = f"""
import os
os.getpid = lambda: {os.getpid()}
from tests.faults.ports import BLOCK, free_port
print(*(free_port() for _ in range(BLOCK)))
"""
    ours = {free_port() for _ in range(BLOCK)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    theirs = {int(port) for port in done.stdout.split()}
    low, high = kernels_range()
    assert theirs and not theirs & ours, done.stderr
    assert all(not low <= port <= high for port in theirs | ours)


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] not in {free_port() for _ in range(2 * BLOCK)}
