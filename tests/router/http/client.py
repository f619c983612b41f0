"""One HTTP client of a stream, by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from router.api.completions.completion import Completion, CompletionRequest
from router.api.completions.response import DONE, Head
from router.api.text import TextAnswer
from router.core.request import Request
from router.http.asgi import Push
from router.http.writer import ResponseWriter
from router.text.tokenizer import Tokenizer
from tests.router.api.scripted import Core
from tests.router.site import LETTERS, events, ids
from wire.aio.fair_writes import FairWrites
from wire.options import Options


class Client:
    """A clock that stands still, a `send` that can be made to block."""

    def __init__(
        self, *, is_streamed: bool = True, push: Push | None = None, turns: FairWrites | None = None
    ) -> None:
        self.now = 0.0
        self.clock: Callable[[], float] = lambda: self.now
        self.sent: list[Any] = []
        self.breaks = False
        self.bodies: asyncio.Queue[bytes] = asyncio.Queue()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.is_writing = asyncio.Event()
        self.tokens: list[tuple[float, int]] = []
        self.cuts: list[Client] = []
        self.core = Core()
        self.writer = ResponseWriter(
            self._send,
            turns or FairWrites(lambda: self.clock()),
            find_push=lambda send: push,
            headers=((b"x", b"y"),),
            clock=lambda: self.clock(),
            cut_off=self._cut,
            on_tokens=lambda gap, count: self.tokens.append((gap, count)),
        )
        asked = CompletionRequest(
            answer=TextAnswer,
            tokenizer=Tokenizer(LETTERS),
            requests=[(Request((8, 9), Options(), 5), "")],
            is_streamed=is_streamed,
        )
        self.completion = Completion(self.core, asked, self.writer)
        self.completion.submit()
        self.sink = self.core.sinks[0]

    def stream(self) -> asyncio.Task[None]:
        chunks = TextAnswer(self.completion, Head("c", 1, "m"))
        return asyncio.create_task(self.writer.stream(self.completion, chunks))

    def say(self, text: str) -> None:
        for token_id in ids(text):
            self.sink.on_token(token_id, None)

    async def _send(self, event: Any) -> None:
        if self.breaks:
            raise RuntimeError("the server broke")
        self.is_writing.set()
        await self.may_write.wait()
        self.sent.append(event)
        if event["type"] == "http.response.body":
            self.bodies.put_nowait(event["body"])

    def _cut(self) -> None:
        self.cuts.append(self)


def text_of(body: bytes) -> str:
    return "".join(each["choices"][0]["text"] for each in events((body + DONE).decode()))
