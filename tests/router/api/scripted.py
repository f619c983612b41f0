"""A core and a writer that write down what a completion asks of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.api.chat import ChatAnswer
from router.api.completions.completion import Choice, Completion, CompletionRequest
from router.core.request import Request
from router.text.stops import StopAutomaton
from router.text.tokenizer import Tokenizer
from tests.router.site import LETTERS
from wire.errors import ErrorCode, WireError
from wire.options import Options

TOKENIZER = Tokenizer(LETTERS)


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
