"""The clients' requests, the right answers, and the record of each client.

Prompts and options come from small fixed tables, so that prefixes are shared and each fault-free
text is computed once however many seeds run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from random import Random
from typing import Final

from router.core.request import RequestEnd
from tests.oracle import oracle
from wire.errors import ErrorCode, WireError
from wire.layout import KVLayout
from wire.options import Options
from wire.payloads import Logprobs, PrefillResult, Usage

# So small that guesses from the text so far (--speculate) often hit.
VOCAB_SIZE: Final = 12
MAX_TOKENS: Final = 24
MAX_PROMPT: Final = 72
NUM_PROMPTS: Final = 40


def _prompts() -> list[tuple[int, ...]]:
    random = Random(0)
    stems = [[random.randrange(VOCAB_SIZE) for _ in range(64)] for _ in range(5)]
    prompts = []
    for _ in range(NUM_PROMPTS):
        stem = random.choice(stems)[: random.choice((0, 8, 16, 40, 64))]
        tail = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 8))]
        prompts.append((*stem, *tail))
    return prompts


PROMPTS: Final = _prompts()
VARIANTS: Final = (
    Options(),
    Options(ignore_eos=True),
    Options(ignore_eos=True, logprobs=1),
    Options(temperature=1.0, seed=7),
    Options(stop_token_ids=(3,), ignore_eos=True),
    Options(stop_token_ids=(5, 6), min_tokens=4),
)
# What a client may hear when something failed; any other code is a fault of ours.
FAIR_CODES: Final = frozenset(
    {
        ErrorCode.OVERLOADED,
        ErrorCode.NO_WORKER,
        ErrorCode.DRAINING,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.WORKER_LOST,
        ErrorCode.TRANSFER_FAILED,
        ErrorCode.OUT_OF_BLOCKS,
    }
)


@cache
def fault_free(prompt: int, variant: int, layout: KVLayout) -> list[int]:
    """Return the longest text any request of this prompt and variant may get."""
    return oracle(PROMPTS[prompt], MAX_TOKENS, VARIANTS[variant], VOCAB_SIZE, layout=layout)


@dataclass(frozen=True)
class Job:
    """One request, planned: times in seconds; `decode_after_s` makes it a raw TCP client's."""

    name: int
    at_s: float
    router: int
    prompt: int
    variant: int
    max_tokens: int
    layout: KVLayout
    priority: int = 0
    deadline_s: float | None = None
    cancel_after_s: float | None = None
    decode_after_s: float | None = None

    @property
    def text(self) -> list[int]:
        return fault_free(self.prompt, self.variant, self.layout)[: self.max_tokens]


class Client:
    """A `router.core.request.Sink` that compares everything with what must come.

    `end` is None while the request is open, then "done", "cancelled", "router lost", or the label
    of an error.  Its `deadline` counts from when the router reads it.
    """

    def __init__(self, job: Job, violate: Callable[[str], None]) -> None:
        self.job, self.deadline = job, inf
        self.end: str | None = None
        self.tokens: list[int] = []
        self.is_begun = False
        self.is_on_the_books = False
        self._expected = job.text
        self._violate = violate

    def finish(self, end: str) -> None:
        if self.end is not None:
            self._violate(f"request {self.job.name}: {end} after {self.end}")
        self.end = end

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        if self.is_begun:
            self._violate(f"request {self.job.name}: a second first token")
        self.is_begun = True
        if result.finish_reason != "stop":
            self._take(result.token_id)

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        if not self.is_begun:
            self._violate(f"request {self.job.name}: a token before the first")
        if (logprobs is None) != (VARIANTS[self.job.variant].logprobs is None):
            self._violate(f"request {self.job.name}: logprobs are {logprobs}")
        self._take(token_id)

    def on_done(self, usage: Usage) -> None:
        self.finish("done")
        if self.tokens != self._expected:
            self._violate(f"request {self.job.name}: ends after {len(self.tokens)} tokens, early")
        reason = "length" if len(self.tokens) == self.job.max_tokens else "stop"
        if usage.finish_reason != reason or usage.completion_tokens != len(self.tokens):
            self._violate(f"request {self.job.name}: {usage} after {len(self.tokens)} tokens")

    def on_error(self, error: WireError) -> None:
        self.finish(error.code.label)
        if error.code not in FAIR_CODES:
            self._violate(f"request {self.job.name}: {error.code.label}: {error.message}")

    def on_end(self, end: RequestEnd) -> None:
        if self.is_on_the_books:
            self._violate(f"request {self.job.name}: entered twice, at last as {end.outcome}")
        self.is_on_the_books = True

    def _take(self, token_id: int) -> None:
        index = len(self.tokens)
        self.tokens.append(token_id)
        if self.end is not None:
            self._violate(f"request {self.job.name}: a token after {self.end}")
        elif self._expected[index : index + 1] != [token_id]:
            self._violate(
                f"request {self.job.name}: token {index} is {token_id}, not that of "
                f"{self._expected[max(0, index - 2) : index + 3]}"
            )
