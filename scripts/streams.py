#!/usr/bin/env python3
"""Clients of a router in a process of their own: bare connections, so that they cost little CPU.

    scripts/streams.py 127.0.0.1 8000 stream --streams 64 --tokens 1000 --pid 4711

Waits for a line on stdin, then asks (`stream`: all at once; `arrivals`: at `--rate` a second;
`requests`: each connection again as soon as it was answered, one token without a stream; `hold`:
streams that never get a second token, kept open until another line comes).  Every token of every
answer is compared with what `scripts/emitters.py` had to say, after the last one has come.  Prints
one JSON line: tokens and seconds, from when every stream had its first token, with what the
process `--pid` and its children took of the CPU meanwhile; and of each request its key, when it was
asked and when the first of its answer came.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.emitters import Flow, answer, vocabulary
from wire.frames import (
    ANY_RANK,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    PrefillDone,
    PrefillRequest,
    Tag,
)
from wire.options import Options
from wire.payloads import decode_prefill_result, encode_prompt
from wire.process.model import locate
from wire.stream import PREFIX, StreamDecoder, encode

PATHS: Final = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# What the mock workers of other routers say, again and again.
HELLO: Final = " hello"


@dataclass(frozen=True)
class Question:
    """What one request asks for."""

    key: int
    num_tokens: int
    flow: Flow
    is_streamed: bool = True


def post(path: str, body: bytes, headers: str = "") -> bytes:
    """Return a request whose body is JSON; each line of `headers` has its end."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}{headers}content-length: {len(body)}\r\n\r\n".encode() + body


class Asker(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.taken: list[bytes] = []
        self.asked_at = self.first_at = 0.0
        self._done: asyncio.Future[None] | None = None
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionError("the router hung up"))

    def ask(self, question: Question) -> asyncio.Future[None]:
        """Send what asks this question, see `send`."""
        return self.send(self.request(question))

    def send(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future is done when all of the answer is in `taken`."""
        self.taken, self.first_at = [], 0.0
        self.first = asyncio.get_running_loop().create_future()
        self._done = asyncio.get_running_loop().create_future()
        self.asked_at = time.monotonic()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self.taken.append(data)
        if not self.first.done() and self.has_token(data):
            self.first_at = time.monotonic()
            self.first.set_result(None)
        # Nobody waits any more where the client itself has ended first.
        if self._done is not None and not self._done.done() and self.is_end(data):
            self._done.set_result(None)

    def request(self, question: Question) -> bytes:
        raise NotImplementedError

    def has_token(self, data: bytes) -> bool:
        raise NotImplementedError

    def is_end(self, data: bytes) -> bool:
        raise NotImplementedError

    def num_tokens(self) -> int:
        """About how many tokens there are by now."""
        raise NotImplementedError

    def problem(self, question: Question, words: Words) -> str:
        """What is wrong with the answer."""
        raise NotImplementedError


class Words:
    """What answers are made of: the tokens, and their text."""

    def __init__(self, model: Path, *, has_peer: bool) -> None:
        self._ids = vocabulary(model)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._has_peer = has_peer

    def ids(self, question: Question) -> list[int]:
        return answer(self._ids, question.key, question.num_tokens)

    def first_of_chats(self) -> int:
        """The first token of a chat's prompt."""
        return int(self._tokenizer.token_to_id("<|user|>") or 0)

    def text(self, question: Question) -> str:
        if self._has_peer:
            return HELLO * question.num_tokens
        return str(self._tokenizer.decode(self.ids(question)))


class HttpAsker(Asker):
    """Completions or chats."""

    def __init__(self, path: str, model: str) -> None:
        super().__init__()
        self._path, self._model = path, model
        self._is_streamed = True
        self._tail = b""

    def request(self, question: Question) -> bytes:
        self._is_streamed, self._tail = question.is_streamed, b""
        body = {
            "model": self._model,
            "max_tokens": question.num_tokens,
            "seed": question.flow.seed,
            "ignore_eos": True,
            "stream": question.is_streamed,
        }
        if "chat" in self._path:
            body["messages"] = [{"role": "user", "content": "hi"}]
        else:
            body["prompt"] = [question.key] if self._model == "demo" else "hi " * 5
        return post(self._path, json.dumps(body).encode())

    def has_token(self, data: bytes) -> bool:
        return b'"choices"' in data

    def is_end(self, data: bytes) -> bool:
        self._tail = (self._tail + data)[-8:]
        # A stream may be read up to the brace of any event.
        return self._tail.endswith(b"\r\n0\r\n\r\n" if self._is_streamed else b"}")

    def num_tokens(self) -> int:
        return b"".join(self.taken).count(b'"choices"')

    def problem(self, question: Question, words: Words) -> str:
        head, _, body = b"".join(self.taken).partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            return body.decode()
        if question.is_streamed:
            events = [each[6:] for each in unchunked(body).split(b"\n\n") if each[6:7] == b"{"]
        else:
            events = [body]
        choices = [choice for each in events for choice in json.loads(each)["choices"]]
        if question.is_streamed and len(choices) != question.num_tokens:
            return f"{len(choices)} chunks, not {question.num_tokens}"
        said = [choice.get("delta", choice.get("message", choice)) for choice in choices]
        text = "".join(each.get("content", each.get("text")) or "" for each in said)
        is_right = text == words.text(question)
        return "" if is_right else f"said {text[:60]!r}…, not {words.text(question)[:60]!r}…"


class TcpAsker(Asker):
    """Raw TCP."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = StreamDecoder()

    def request(self, question: Question) -> bytes:
        prompt = encode_prompt([question.key], Options(seed=question.flow.seed, ignore_eos=True))
        parts = encode(PrefillRequest(1, 1, ANY_RANK), prompt)
        return b"".join([*parts, *encode(DecodeRequest(1, question.num_tokens - 1))])

    def has_token(self, data: bytes) -> bool:
        return True

    def is_end(self, data: bytes) -> bool:
        return PREFIX.pack(Tag.DECODE_DONE, 0)[:4] in data[-200:] and b"length" in data[-200:]

    def num_tokens(self) -> int:
        return sum(map(len, self.taken)) // 24

    def problem(self, question: Question, words: Words) -> str:
        for data in self.taken:
            self._decoder.receive(data)
        token_ids = list[int]()
        while (message := self._decoder.next_message()) is not None:
            match message.frame:
                case PrefillDone():
                    token_ids.append(decode_prefill_result(message.body()).token_id)
                case DecodeToken(token_id=token_id):
                    token_ids.append(token_id)
                case DecodeDone():
                    pass
                case other:
                    return f"{other}: {bytes(message.body())!r}"
        expected = words.ids(question)
        return "" if token_ids == expected else f"said {token_ids[:9]}…, not {expected[:9]}…"


def unchunked(body: bytes) -> bytes:
    """Return a chunked body without its framing."""
    parts, at = list[bytes](), 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + size + 4


class Cpu:
    """What a process and its children have used: seconds as user and as system."""

    def __init__(self, pid: int | None) -> None:
        self._processes = list[psutil.Process]()
        if pid is not None:
            process = psutil.Process(pid)
            self._processes = [process, *process.children(recursive=True)]
        self._before = self._now()

    def used(self) -> tuple[float, float]:
        """Return both since the beginning."""
        total, user, system = (b - a for a, b in zip(self._before, self._now(), strict=True))
        # The kernel counts all of it exactly, and how it divides by looking now and then.
        share = user / (user + system or 1.0)
        return total * share, total * (1 - share)

    def _now(self) -> tuple[float, float, float]:
        times = [process.cpu_times() for process in self._processes]
        # The clock of another process, as clock_getcpuclockid(3) makes it.
        clocks = [time.clock_gettime((~each.pid << 3) | 2) for each in self._processes]
        return sum(clocks), sum(each.user for each in times), sum(each.system for each in times)


class Clients:
    """All connections of this process."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._askers: list[Asker] = []
        self._words = Words(locate("demo"), has_peer=given.model != "demo")
        self._problems: list[str] = []
        # The key of each, when it was asked and when the first of its answer came, by the clock
        # of all processes.
        self._spans: list[tuple[int, float, float]] = []

    async def connect(self, num: int) -> None:
        given, loop = self._given, asyncio.get_running_loop()
        for _ in range(num):
            make = TcpAsker if given.face == "tcp" else self._http
            _, asker = await loop.create_connection(make, given.host, given.port)
            self._askers.append(asker)

    def _http(self) -> HttpAsker:
        return HttpAsker(PATHS[self._given.face], self._given.model)

    async def stream(self) -> dict[str, Any]:
        """All at once."""
        given = self._given
        flow = Flow(given.pace_us, given.streams)
        keys = list(range(10, 10 + given.streams))
        if given.face == "chat":
            keys = [self._words.first_of_chats()] * given.streams
        questions = [Question(key, given.tokens, flow) for key in keys]
        done = [each.ask(q) for each, q in zip(self._askers, questions, strict=True)]
        await asyncio.wait([each.first for each in self._askers])
        cpu, start = Cpu(given.pid), time.monotonic()
        num_before = sum([each.num_tokens() for each in self._askers])
        await asyncio.gather(*done)
        seconds, (user_s, system_s) = time.monotonic() - start, cpu.used()
        for asker, question in zip(self._askers, questions, strict=True):
            self._check(asker, question)
        num_tokens = given.streams * given.tokens - num_before
        return {"tokens": num_tokens, "seconds": seconds, "user_s": user_s, "system_s": system_s}

    async def hold(self) -> dict[str, Any]:
        """Streams with a first token, until a line comes."""
        flow = Flow(0, 2**30)
        done = [asker.ask(Question(10 + i % 100, 9, flow)) for i, asker in enumerate(self._askers)]
        await asyncio.wait([each.first for each in self._askers])
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for asker, answered in zip(self._askers, done, strict=True):
            answered.cancel()
            asker.transport.abort()
        return {}

    async def requests(self) -> dict[str, Any]:
        """One token each, without a stream."""
        given = self._given
        left = iter(range(given.requests))
        cpu, start = Cpu(given.pid), time.monotonic()

        async def again(asker: Asker) -> None:
            for index in left:
                question = Question(10 + index % 100, 1, Flow(), is_streamed=False)
                await asker.ask(question)
                self._check(asker, question)

        await asyncio.gather(*map(again, self._askers))
        seconds, (user_s, system_s) = time.monotonic() - start, cpu.used()
        return {
            "tokens": given.requests,
            "seconds": seconds,
            "user_s": user_s,
            "system_s": system_s,
        }

    async def arrivals(self) -> dict[str, Any]:
        """At a rate, whoever is answered or not."""
        given, start = self._given, time.monotonic()
        flow, asked = Flow(given.pace_us), list[asyncio.Task[None]]()
        for index in range(given.requests):
            await asyncio.sleep(max(start + index / given.rate - time.monotonic(), 0.0))
            question = Question(10 + index % 100, given.tokens, flow)
            asked.append(asyncio.create_task(self._ask_once(question)))
        await asyncio.gather(*asked)
        return {"seconds": time.monotonic() - start}

    async def _ask_once(self, question: Question) -> None:
        """On a connection that nobody uses, and that the router has not found too silent."""
        self._askers = [each for each in self._askers if not each.transport.is_closing()]
        if not self._askers:
            await self.connect(1)
        asker = self._askers.pop()
        await asker.ask(question)
        self._check(asker, question)
        self._askers.append(asker)

    def _check(self, asker: Asker, question: Question) -> None:
        self._spans.append((question.key, asker.asked_at, asker.first_at))
        problem = asker.problem(question, self._words)
        if problem:
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
