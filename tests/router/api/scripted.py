"""A core and a writer that write down what a completion asks of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.api.chat import ChatAnswer
from router.api.completions.completion import Choice, Completion, CompletionRequest, NewAnswer
from router.api.completions.deltas import joined
from router.api.completions.response import Head
from router.core.request import Request
from router.text.stops import StopAutomaton
from router.text.tokenizer import Tokenizer
from tests.router.site import LETTERS, ids
from wire.errors import ErrorCode, WireError
from wire.options import Options
from wire.payloads import Logprobs, Usage

TOKENIZER = Tokenizer(LETTERS)
HEAD = Head("1", 7, "m")


@dataclass
class Core:
    """Writes down what is submitted and cancelled; refuses from `capacity` on."""

    capacity: int = 99
    refusal: BaseException = field(default_factory=lambda: WireError(ErrorCode.OVERLOADED, "full"))
    sinks: list[Choice] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)

    def submit(self, request: Request, sink: Choice) -> int:
        if len(self.sinks) >= self.capacity:
            raise self.refusal
        self.sinks.append(sink)
        return len(self.sinks)

    def stop(self, handle: int) -> None:
        self.stopped.append(handle)

    def cancel(self, handle: int, code: ErrorCode = ErrorCode.CANCELLED) -> None:
        self.cancelled.append(handle)


@dataclass
class Writer:
    wakes: int = 0
    overruns: int = 0

    def wake(self) -> None:
        self.wakes += 1

    def write(self) -> None:
        self.wakes += 1

    def overrun(self) -> None:
        self.overruns += 1


def started(
    core: Core, count: int = 2, *, stop: str | None = None, per_prompt: int = 1
) -> tuple[Completion, Writer]:
    writer = Writer()
    asked = CompletionRequest(
        tokenizer=TOKENIZER,
        answer=ChatAnswer,
        requests=[(Request((1, 2, 3), Options(), 5), "")] * count,
        num_choices=per_prompt,
        stops=StopAutomaton([stop]) if stop else None,
    )
    subject = Completion(core, asked, writer)
    subject.submit()
    return subject, writer


class Scene:
    """A completion whose tokens come when a test says so, and the answer that renders it."""

    def __init__(
        self,
        answer: NewAnswer,
        count: int = 1,
        *,
        prompt: Sequence[int] = (8, 9),
        prefix: str = "",
        **asked: Any,
    ) -> None:
        self.core = Core()
        request = CompletionRequest(
            tokenizer=TOKENIZER,
            answer=answer,
            requests=[(Request(tuple(prompt), Options(), 98), prefix)] * count,
            num_choices=count,
            **asked,
        )
        self.completion = Completion(self.core, request, Writer())
        self.completion.submit()
        self.answer = request.answer(self.completion, HEAD)

    def say(self, text: str) -> None:
        self.say_ids(ids(text))

    def say_ids(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            scores = Logprobs(logprob=-0.5, top=((token_id, -0.5),))
            self.core.sinks[0].on_token(token_id, scores)

    def end(self, reason: str = "stop") -> None:
        self.core.sinks[0].on_done(Usage(finish_reason=reason))

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        pieces = []
        while not self.completion.is_over:
            pieces += [piece for _, taken in self.completion.take() for piece in taken]
        return dict(json.loads(self.answer.whole([joined(pieces)])))
