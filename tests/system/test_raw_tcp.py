"""A raw TCP client written from SPEC.md alone, with nothing of `wire`, against a real router.

What a client meets where the text once was silent: each answer is one of sections 1.2, 2.2, 4.5, 8.
"""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from tests.cluster import Cluster, until

PREFILL_REQUEST, PREFILL_DONE, DECODE_REQUEST, TOKEN, DONE = 30, 31, 34, 35, 36
HELLO, CANCEL, ERROR, DRAIN = 40, 44, 45, 46
PROTOCOL, INVALID_REQUEST, CONTEXT_LENGTH, DRAINING, DEADLINE = 2, 3, 5, 10, 11
ANY, AS_MANY_AS_FIT = 0xFFFFFFFF, 0xFFFFFFFF
CONTEXT = 64
ARGS = (
    *("--lease-ms", "1000"),
    f"--worker-args=--max-model-len {CONTEXT} --hash-step-ms 5",
)
LONG = 30_000  # tokens: half a minute of `hash_cluster`, which has nothing else to do


class Said(NamedTuple):
    """One frame of the router: what it is, whose, and the number or map that comes with it."""

    tag: int
    request_id: int
    what: Any


class Client:
    """Frames are sent together when a response is read, so that no lease ends in between."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=60)
        self.stream = self.socket.makefile("rwb")

    def say(self, tag: int, header: bytes, payload: bytes = b"") -> None:
        self.stream.write(struct.pack("<II", tag, 16 + len(payload)) + header + payload)

    def ask(self, request_id: int, *token_ids: int, options: bytes = b"") -> None:
        prompt = struct.pack(f"<{len(token_ids)}I", *token_ids)
        header = struct.pack("<QII", request_id, len(token_ids), ANY)
        self.say(PREFILL_REQUEST, header, prompt + options)

    def decode(self, request_id: int, max_new_tokens: int) -> None:
        self.say(DECODE_REQUEST, struct.pack("<QII", request_id, max_new_tokens, 0))

    def cancel(self, request_id: int) -> None:
        self.say(CANCEL, struct.pack("<QII", request_id, 12, 0))

    def hello(self, epoch: int = 0, rank: int = 0) -> None:
        self.say(HELLO, struct.pack("<QIBBH", epoch, rank, 3, 1, 0), b"any key")

    def next(self) -> Said | None:
        """The next frame, None when the router hung up."""
        self.stream.flush()
        head = self.stream.read(8)
        if not head:
            return None
        tag, length = struct.unpack("<II", head)
        body = self.stream.read(length)
        (request_id,) = struct.unpack_from("<Q", body)
        if tag == PREFILL_DONE:
            return Said(tag, request_id, struct.unpack_from("<q", body, 16)[0])
        if tag == ERROR:
            assert msgspec.msgpack.decode(body[16:])["message"]
            return Said(tag, request_id, struct.unpack_from("<I", body, 8)[0])
        if tag == DONE:
            return Said(tag, request_id, msgspec.msgpack.decode(body[16:]))
        assert tag == TOKEN, tag
        return Said(tag, request_id, struct.unpack_from("<q", body, 8)[0])

    def rest(self) -> list[Said]:
        """Every frame up to an end; the router may hang up before."""
        found: list[Said] = []
        while (said := self.next()) is not None:
            found.append(said)
            if said.tag in (DONE, ERROR):
                break
        return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A context of 64 tokens, a lease of a second."""
    with Cluster(tmp_path_factory.mktemp("small"), executor="hash", args=ARGS) as cluster:
        yield cluster


@contextmanager
def connected(cluster: Cluster) -> Iterator[Client]:
    client = Client(cluster.tcp)
    with client.socket, client.stream:
        yield client


def options(**keys: object) -> bytes:
    return msgspec.msgpack.encode({"ignore_eos": True} | keys)


def is_draining(cluster: Cluster) -> bool:
    return httpx.get(cluster.http + "/readyz", trust_env=False, timeout=60).status_code == 503


@pytest.mark.parametrize(
    ("keys", "max_new_tokens", "completion_tokens"),
    [
        ({}, 0, 1),
        ({}, AS_MANY_AS_FIT, CONTEXT - 3),
        ({"max_tokens": 4}, 9, 4),
        ({"max_tokens": 9}, 3, 4),
    ],
)
def test_the_lower_limit_holds(
    small: Cluster, keys: dict[str, int], max_new_tokens: int, completion_tokens: int
) -> None:
    with connected(small) as client:
        client.ask(1, 7, 8, 9, options=options(**keys))
        client.decode(1, max_new_tokens)
        first, *tokens, done = client.rest()
        assert first.tag == PREFILL_DONE and done.tag == DONE
        assert len(tokens) + 1 == done.what["completion_tokens"] == completion_tokens
        assert done.what["finish_reason"] == "length"


def test_a_late_decode_request_is_too_late_after_the_lease(small: Cluster) -> None:
    with connected(small) as client:
        client.ask(1, 7, 8, 9)
        assert [said[::2] for said in client.rest()][1:] == [(ERROR, DEADLINE)]
        client.decode(1, 1)  # crossed the end: it changes nothing
        client.ask(2, 7, 8, 9)
        client.decode(2, 1)
        assert {said.request_id for said in client.rest()} == {2}


def test_hello_comes_first_once_and_plain(small: Cluster) -> None:
    for sequence in ("hh", "ah", "e", "r"):
        with connected(small) as client:
            for step in sequence:
                match step:
                    case "h":
                        client.hello()
                    case "a":
                        client.ask(1, 7)
                    case "e":
                        client.hello(epoch=1)
                    case _:
                        client.hello(rank=1)
            assert client.rest()[-1] == Said(ERROR, 0, PROTOCOL), sequence
            assert client.next() is None
    with connected(small) as client:
        client.hello()
        client.ask(1, 7)
        client.decode(1, 0)
        assert client.rest()[-1].tag == DONE


def test_an_id_may_be_used_again_right_after_its_cancel(hash_cluster: Cluster) -> None:
    """The new request is served whole; what of the old one was under way comes before it."""
    with connected(hash_cluster) as client:
        client.ask(1, 7, 8, 9, options=options())
        client.decode(1, LONG)
        while (said := client.next()) is not None and said.tag != TOKEN:
            pass
        client.cancel(1)
        client.ask(1, 4, 5, 6, options=options())
        client.decode(1, 2)
        found = client.rest()
        begin = next(i for i, said in enumerate(found) if said.tag == PREFILL_DONE)
        assert {said.tag for said in found[:begin]} <= {TOKEN}
        assert [said.tag for said in found[begin:]] == [PREFILL_DONE, TOKEN, TOKEN, DONE]
        hash_cluster.until_idle()  # the old one is over too, long before its end


def test_a_half_closed_connection_is_closed_and_its_requests_cancelled(
    hash_cluster: Cluster,
) -> None:
    with connected(hash_cluster) as client:
        client.ask(1, 7, 8, 9, options=options())
        client.decode(1, LONG)
        assert (first := client.next()) is not None and first.tag == PREFILL_DONE
        client.socket.shutdown(socket.SHUT_WR)
        assert DONE not in [said.tag for said in client.rest()]
    hash_cluster.until_idle()


def test_a_router_that_drains_says_so_to_requests_not_to_clients(tmp_path: Path) -> None:
    with Cluster(tmp_path, executor="hash", args=ARGS[2:]) as cluster, connected(cluster) as client:
        client.ask(1, 7, 8, 9, options=options())
        assert (said := client.next()) and (said.tag, said.request_id) == (PREFILL_DONE, 1)
        cluster.router.send_signal(signal.SIGTERM)
        until(lambda: is_draining(cluster), "it drains")
        client.ask(2, 7)
        assert client.next() == Said(ERROR, 2, DRAINING)
        client.decode(1, AS_MANY_AS_FIT)  # it is open, parked since before the drain
        end = client.rest()[-1]
        assert (end.tag, end.request_id) == (DONE, 1)
        assert end.what["completion_tokens"] == CONTEXT - 3
        assert client.next() is None
