"""A response ends with its last byte, and its events are read with the times at which they came."""

from __future__ import annotations

import pytest

from router.command.bench.connection import HttpConnection

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "is_whole"),
    [
        ([HEAD + b"content-length: 4\r\n\r\n", b"{}}"], False),
        ([HEAD + b"content-length: 4\r\n\r\n{}", b"}}"], True),
        ([HEAD + b"content-", b"length: 2\r\n\r\n{", b"}"], True),
        ([CHUNKED + b"2\r\n{}\r\n"], False),
        ([CHUNKED + b"2\r\n{}\r\n", b"0\r\n\r\n"], True),
    ],
)
async def test_a_response_is_whole_with_its_last_byte(pieces: list[bytes], is_whole: bool) -> None:
    connection, ends = HttpConnection(), []
    for piece in pieces:
        connection.chunks.append(piece)
        ends.append(connection.is_end(piece))
    assert ends == [False] * (len(pieces) - 1) + [is_whole]


async def test_events_have_the_times_of_their_last_bytes() -> None:
    connection = HttpConnection()
    connection.chunks = [CHUNKED + b'c\r\ndata: {"a":', b'1}\n\n\r\nd\r\ndata: {"a": 2}\n\n\r\n']
    connection.chunks.append(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    connection.times = [1.0, 2.0, 3.0]
    assert list(connection.events()) == [(2.0, {"a": 1}), (2.0, {"a": 2})]
    connection.chunks, connection.times = [HEAD + b"content-length: 8\r\n\r\n", b'{"a": 3}'], [1, 4]
    assert list(connection.events()) == [(4, {"a": 3})]
