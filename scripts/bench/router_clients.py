#!/usr/bin/env python3
"""Clients of a router, in one process that `bench_router.py` starts.

    scripts/bench/router_clients.py 127.0.0.1 8000 stream --streams 64 --tokens 1000 --pid 4711

Waits for a line on stdin, then sends requests of one kind:

    stream      all at once
    arrivals    at a rate of `--rate` per second
    requests    one token each, not streamed, repeatedly on each connection
    hold        streams that stop after the first token, open until another line on stdin

After the last response, compares every token with the output of `emitters.py`.  Prints one JSON
line: the number of tokens, the seconds from when all streams had their first token, the CPU seconds
that the process `--pid` and its children used meanwhile, and for each request its key, when it was
sent and when its first token arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import tokenizers
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from router.command.bench.connection import (
    CHAT,
    COMPLETIONS,
    Connection,
    HttpConnection,
    open_http,
)
from scripts.bench.emitters import Flow, answer, vocabulary
from scripts.bench.processes import Cpu
from scripts.bench.tcp_connection import TcpConnection, open_tcp
from wire.process.model import locate

PATHS: Final = {"completions": COMPLETIONS, "chat": CHAT}
# The text of each token that the mock workers of other routers send.
HELLO: Final = " hello"


@dataclass(frozen=True)
class Question:
    """One request, whose key determines the output."""

    key: int
    num_tokens: int
    flow: Flow
    is_streamed: bool = True


class Answers:
    """The expected outputs, as token ids and as text."""

    def __init__(self, model: Path, *, has_peer: bool) -> None:
        self._ids = vocabulary(model)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._has_peer = has_peer

    def first_of_chats(self) -> int:
        """Return the first token id of the prompt of a chat."""
        return int(self._tokenizer.token_to_id("<|user|>") or 0)

    def problem(self, connection: Connection, question: Question) -> str:
        """Return the problem with a response, or ""."""
        expected = answer(self._ids, question.key, question.num_tokens)
        if isinstance(connection, TcpConnection):
            try:
                found = connection.token_ids()
            except ConnectionError as error:
                return str(error)
            return "" if found == expected else f"{found[:9]}…, not {expected[:9]}…"
        assert isinstance(connection, HttpConnection)
        if connection.status != 200:
            return connection.body.decode()
        choices = [choice for _, each in connection.events() for choice in each["choices"]]
        if question.is_streamed and len(choices) != question.num_tokens:
            return f"{len(choices)} chunks, not {question.num_tokens}"
        parts = [choice.get("delta", choice.get("message", choice)) for choice in choices]
        text = "".join(each.get("content", each.get("text")) or "" for each in parts)
        expected_text = str(self._tokenizer.decode(expected))
        if self._has_peer:
            expected_text = HELLO * question.num_tokens
        return "" if text == expected_text else f"{text[:60]!r}…, not {expected_text[:60]!r}…"


class Clients:
    """All clients of this process."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._connections: list[Connection] = []
        self._answers = Answers(locate("demo"), has_peer=given.model != "demo")
        self._problems: list[str] = []
        # For each request its key, when it was sent and when its first token arrived.
        self._spans: list[tuple[int, float, float]] = []

    async def connect(self, num: int) -> None:
        given = self._given
        connect = open_tcp if given.face == "tcp" else open_http
        self._connections += [await connect(given.host, given.port) for _ in range(num)]

    def _send(self, connection: Connection, question: Question) -> asyncio.Future[None]:
        given, seed = self._given, question.flow.seed
        if isinstance(connection, TcpConnection):
            return connection.complete([question.key], question.num_tokens, seed)
        assert isinstance(connection, HttpConnection)
        body: dict[str, Any] = {
            "model": given.model,
            "max_tokens": question.num_tokens,
            "seed": seed,
            "ignore_eos": True,
            "stream": question.is_streamed,
        }
        if given.face == "chat":
            body["messages"] = [{"role": "user", "content": "hi"}]
        else:
            body["prompt"] = [question.key] if given.model == "demo" else "hi " * 5
        return connection.post(PATHS[given.face], body)

    async def stream(self) -> dict[str, Any]:
        """Run all streams at once; measure from when all have their first token."""
        given = self._given
        flow = Flow(given.pace_us, given.streams)
        keys = list(range(10, 10 + given.streams))
        if given.face == "chat":
            keys = [self._answers.first_of_chats()] * given.streams
        questions = [Question(key, given.tokens, flow) for key in keys]
        pairs = list(zip(self._connections, questions, strict=True))
        done = [self._send(*pair) for pair in pairs]
        await asyncio.wait([each.first for each in self._connections])
        cpu, start = self._cpu(), time.monotonic()
        num_before = sum([each.num_tokens() for each in self._connections])
        await asyncio.gather(*done)
        measured = self._measured(cpu, start, given.streams * given.tokens - num_before)
        for pair in pairs:
            self._check(*pair)
        return measured

    async def hold(self) -> dict[str, Any]:
        """Open streams that stop after the first token, until a line on stdin."""
        flow = Flow(0, 2**30)
        questions = [Question(10 + i % 100, 9, flow) for i in range(len(self._connections))]
        done = [self._send(*pair) for pair in zip(self._connections, questions, strict=True)]
        await asyncio.wait([each.first for each in self._connections])
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for connection, response in zip(self._connections, done, strict=True):
            response.cancel()
            connection.transport.abort()
        return {}

    async def requests(self) -> dict[str, Any]:
        """Run one-token requests repeatedly on each connection."""
        indices = iter(range(self._given.requests))
        cpu, start = self._cpu(), time.monotonic()

        async def repeat(connection: Connection) -> None:
            for index in indices:
                question = Question(10 + index % 100, 1, Flow(), is_streamed=False)
                await self._send(connection, question)
                self._check(connection, question)

        await asyncio.gather(*map(repeat, self._connections))
        return self._measured(cpu, start, self._given.requests)

    async def arrivals(self) -> dict[str, Any]:
        """Start streams at a fixed rate."""
        given, start = self._given, time.monotonic()
        flow, tasks = Flow(given.pace_us), list[asyncio.Task[None]]()
        for index in range(given.requests):
            await asyncio.sleep(max(start + index / given.rate - time.monotonic(), 0.0))
            question = Question(10 + index % 100, given.tokens, flow)
            tasks.append(asyncio.create_task(self._send_once(question)))
        await asyncio.gather(*tasks)
        return {"seconds": time.monotonic() - start}

    async def _send_once(self, question: Question) -> None:
        """Send a request on an idle connection that is still open, or on a new one."""
        self._connections = [it for it in self._connections if not it.transport.is_closing()]
        if not self._connections:
            await self.connect(1)
        connection = self._connections.pop()
        await self._send(connection, question)
        self._check(connection, question)
        self._connections.append(connection)

    def _cpu(self) -> Cpu:
        if self._given.pid is None:
            return Cpu([])
        process = psutil.Process(self._given.pid)
        return Cpu([process, *process.children(recursive=True)])

    def _measured(self, cpu: Cpu, start: float, num_tokens: int) -> dict[str, Any]:
        seconds, (user_s, system_s) = time.monotonic() - start, cpu.used()
        return {"tokens": num_tokens, "seconds": seconds, "user_s": user_s, "system_s": system_s}

    def _check(self, connection: Connection, question: Question) -> None:
        self._spans.append((question.key, connection.sent_at, connection.first_at))
        if problem := self._answers.problem(connection, question):
            self._problems.append(problem)

    def report(self, measured: dict[str, Any]) -> int:
        print(json.dumps(measured | {"spans": self._spans, "problems": self._problems[:5]}))
        return bool(self._problems)


async def run(given: argparse.Namespace) -> int:
    clients = Clients(given)
    await clients.connect(given.streams)
    await asyncio.to_thread(sys.stdin.readline)
    return clients.report(await getattr(clients, given.kind)())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("kind", choices=("stream", "arrivals", "requests", "hold"))
    parser.add_argument("--face", choices=(*PATHS, "tcp"), default="completions")
    parser.add_argument("--model", default="demo", help="another: the mock workers of a peer")
    parser.add_argument("--streams", type=int, default=64, help="connections")
    parser.add_argument("--tokens", type=int, default=1000, help="of each answer")
    parser.add_argument("--pace-us", type=int, default=0, help="between them; 0: saturated")
    parser.add_argument("--requests", type=int, default=1000, help="all together")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--pid", type=int, help="whose CPU counts")
    sys.exit(uvloop.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
