"""A completion: what one HTTP request asks for, and the choices that answer it.

A `Choice` is the sink of one request to the core.  Its `on_…` methods only take note and wake the
writer once for however many tokens arrive together; `take` then does the work: text, stop strings,
end.  Every token has a piece, for who measures a stream counts them.  Where text is held back (half
a character, the beginning of a stop string) the piece is empty and a later one has it.

A `Completion` holds the choices of one HTTP request.  It is all or nothing: when one of them is
refused or fails, the others are cancelled.

Pure: no clock, no loop.  What a piece looks like on the network is `router.http.sse` and
`router.http.responses`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from router.core.request import Request, RequestEnd
from router.log import facts
from router.text.stops import StopAutomaton, StopMatcher
from router.text.tokenizer import Tokenizer
from wire.errors import ErrorCode, WireError
from wire.logprobs import unpack_prompt_logprobs
from wire.payloads import Logprobs, PrefillResult, Usage

# Tokens a client may lag behind before it is cut off: some 100 KB of events, on top of the server's
# 64 KiB and the kernel's buffers, which are full by then.
MAX_PENDING_TOKENS: Final = 4096
# Tokens that are taken before others have their turn: some milliseconds, with their scores.
MAX_AT_ONCE: Final = 64


class ScoredToken(NamedTuple):
    """A token with its log-probabilities and where its text starts in the choice's text.

    A prompt's first token has no log-probabilities: nothing precedes it.
    """

    token_id: int
    logprobs: Logprobs | None
    text_offset: int


class Piece(NamedTuple):
    """What one event shows: text, the tokens if asked for, and in the last one why it ended."""

    text: str
    token_ids: Sequence[int] = ()
    scores: Sequence[ScoredToken] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One HTTP request, understood: what to ask the core, and what to show of its answers.

    `requests` are for `num_choices` choices of each prompt, in that order, each with the text to
    echo before it.
    """

    tokenizer: Tokenizer
    requests: Sequence[tuple[Request, str]] = ()
    num_choices: int = 1
    stops: StopAutomaton | None = None
    # Stop strings in fewer tokens do not count.
    min_tokens: int = 0
    is_chat: bool = False
    is_streamed: bool = True
    # Whether only the prompt is wanted, and not the token that is drawn after it.
    is_echo_only: bool = False
    has_logprobs: bool = False
    # Whether pieces name their tokens.
    has_ids: bool = False
    # Whether a stream ends with what it has cost, and whether every event says what it has so far.
    has_usage: bool = False
    has_running_usage: bool = False

    @property
    def is_eager(self) -> bool:
        """Whether somebody looks at the tokens before the end, and is to be woken by them."""
        return self.is_streamed or self.stops is not None


@dataclass(eq=False, slots=True)
class Choice:
    """The sink of one request.  `wake` is called when `take` has something to do."""

    index: int
    prompt: Sequence[int]
    asked: CompletionRequest
    wake: Callable[[Choice], None]
    # Text that precedes the answer (`echo`).
    prefix: str = ""

    handle: int | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: WireError | None = None
    usage: Usage | None = None
    end: RequestEnd | None = None
    # A stop string is in the first token: it can be ended before a decode worker gets it.
    is_stopped_at_once: bool = False

    _pending: list[int] = field(default_factory=list)
    _logprobs: list[Logprobs | None] = field(default_factory=list)
    _prompt_logprobs: bytes | None = None
    _scores: list[ScoredToken] = field(default_factory=list)
    _length: int = 0
    _feed: Callable[[int], str] = field(init=False)
    _flush: Callable[[], str] = field(init=False)
    _stops: StopMatcher | None = field(init=False)
    _is_plain: bool = field(init=False)
    _is_eager: bool = field(init=False)

    def __post_init__(self) -> None:
        detokenizer = self.asked.tokenizer.detokenizer(self.prompt)
        self._feed, self._flush = detokenizer.feed, detokenizer.flush
        self._stops = StopMatcher(self.asked.stops) if self.asked.stops else None
        self._is_eager = self.asked.is_eager
        self._is_plain = not (self.asked.stops or self.asked.has_ids or self.asked.has_logprobs)
        self._length = len(self.prefix)

    @property
    def is_over(self) -> bool:
        """Nothing more will come out of `take`."""
        return self.finish_reason is not None or self.error is not None

    @property
    def lag(self) -> int:
        """Tokens that have come and were not taken."""
        return len(self._pending)

    # The sink.

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        self.cached_tokens = result.cached_tokens
        self._prompt_logprobs = result.prompt_logprobs
        if self.asked.is_echo_only:
            return
        if result.finish_reason != "stop":  # else the token is EOS, which has no text
            self.is_stopped_at_once = self._stops_at(result.token_id)
            self.on_token(result.token_id, result.logprobs)

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        self._pending.append(token_id)
        if self.asked.has_logprobs:
            self._logprobs.append(logprobs)
        if self._is_eager:
            self.wake(self)

    def on_done(self, usage: Usage) -> None:
        self.usage = usage
        self.wake(self)

    def on_error(self, error: WireError) -> None:
        self.error = error
        self.wake(self)

    def on_end(self, end: RequestEnd) -> None:
        self.end = end

    # The writer.

    def take(self, max_tokens: int = sys.maxsize) -> list[Piece]:
        """Return the pieces of the next `max_tokens`; the last one of all has the finish reason.

        When this ends the choice by a stop string, the caller must cancel `handle`.
        """
        if self.finish_reason is not None:
            self._pending.clear()
            return []
        token_ids, self._pending = self._pending[:max_tokens], self._pending[max_tokens:]
        if self._prompt_logprobs is not None:
            self._scores = self._take_prompt_scores(self._prompt_logprobs)
            self._prompt_logprobs = None
        if self._is_plain:
            pieces = self._take_plain(token_ids)
        else:
            pieces = self._take(token_ids)
        if self.usage is not None and self.finish_reason is None and not self._pending:
            rest = self._rest()
            is_stopped = self._stops is not None and self._stops.is_stopped
            reason = "length" if self.asked.is_echo_only else self.usage.finish_reason
            self._finish(pieces, rest, "stop" if is_stopped else reason)
        return pieces

    def _take_plain(self, token_ids: list[int]) -> list[Piece]:
        """The same as `_take` where there is only text to show, as for most tokens."""
        self.num_tokens += len(token_ids)
        return [Piece(self._feed(token_id)) for token_id in token_ids]

    def _take(self, token_ids: list[int]) -> list[Piece]:
        num_tokens = len(token_ids)
        logprobs, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        asked, pieces = self.asked, list[Piece]()
        for position, token_id in enumerate(token_ids):
            text = self._text_of(token_id)
            if asked.has_logprobs:
                self._scores.append(ScoredToken(token_id, logprobs[position], self._length))
            self._length += len(text)
            pieces.append(self._piece(text, [token_id] if asked.has_ids else ()))
            if self._stops is not None and self._stops.is_stopped:
                self._finish(pieces, "", "stop")
                break
        return pieces

    def _take_prompt_scores(self, packed: bytes) -> list[ScoredToken]:
        rows = [None, *unpack_prompt_logprobs(packed)]
        feed = self.asked.tokenizer.detokenizer().feed
        scores, offset = list[ScoredToken](), 0
        for token_id, logprobs in zip(self.prompt, rows, strict=False):
            scores.append(ScoredToken(token_id, logprobs, min(offset, len(self.prefix))))
            offset += len(feed(token_id))
        return scores

    def _stops_at(self, token_id: int) -> bool:
        """Whether the first token alone contains a stop string."""
        if self.asked.stops is None or self.asked.min_tokens:
            return False
        matcher = StopMatcher(self.asked.stops)
        matcher.feed(self.asked.tokenizer.detokenizer(self.prompt).feed(token_id))
        return matcher.is_stopped

    def _text_of(self, token_id: int) -> str:
        self.num_tokens += 1
        text = self._feed(token_id)
        if self._stops is not None and self.num_tokens > self.asked.min_tokens:
            return self._stops.feed(text)
        return text

    def _rest(self) -> str:
        text = self._flush()
        if self._stops is None:
            return text
        text = self._stops.feed(text)
        return text if self._stops.is_stopped else text + self._stops.flush()

    def _piece(
        self, text: str, token_ids: Sequence[int] = (), finish_reason: str | None = None
    ) -> Piece:
        scores, self._scores = self._scores, []
        return Piece(text, token_ids, scores, finish_reason)

    def _finish(self, pieces: list[Piece], text: str, reason: str) -> None:
        # The end goes out with the last token where possible: who measures the time between tokens
        # takes each event for one.
        self.finish_reason = reason
        rest = self._piece(text, (), reason)
        if pieces:
            last = pieces.pop()
            rest = Piece(
                last.text + rest.text,
                [*last.token_ids, *rest.token_ids],
                [*last.scores, *rest.scores],
                reason,
            )
        pieces.append(rest)


class Core(Protocol):
    """The part of `router.core.dispatcher.Dispatcher` that is used here."""

    def submit(self, request: Request, sink: Choice) -> int: ...

    def cancel(self, handle: int, code: ErrorCode = ErrorCode.CANCELLED) -> None: ...

    def stop(self, handle: int) -> None: ...


class Writer(Protocol):
    """Who writes the answer."""

    def wake(self) -> None:
        """There is something to take."""

    def overrun(self) -> None:
        """A choice has more untaken tokens than anyone should let pile up."""


class Completion:
    """The choices of one HTTP request, submitted together and ended together."""

    def __init__(self, core: Core, asked: CompletionRequest, writer: Writer) -> None:
        self.asked = asked
        self._core = core
        self._writer = writer
        self._dirty: dict[Choice, None] = {}
        self._num_open = 0
        self.choices: list[Choice] = []
        self.error: WireError | None = None
        # Tokens that the last `take` took.
        self.num_new_tokens = 0

    @property
    def is_over(self) -> bool:
        return self._num_open == 0 or self.error is not None

    @property
    def outcome(self) -> str:
        """Why it ended, in one word for the log."""
        if self.error is not None:
            return self.error.code.label
        reasons = [each.finish_reason for each in self.choices if each.finish_reason is not None]
        return min(reasons, default="ok")

    @property
    def facts(self) -> dict[str, Any]:
        """What the log says of it."""
        ends = [choice.end for choice in self.choices if choice.end is not None]
        return {"choices": len(self.choices), **facts(ends)}

    def submit(self) -> None:
        """Submit every request.

        Raises:
            WireError: One was refused.  Whatever is raised, none is left running.
        """
        try:
            for index, (request, prefix) in enumerate(self.asked.requests):
                choice = Choice(index, request.token_ids, self.asked, self._on_wake, prefix)
                choice.handle = self._core.submit(request, choice)
                self.choices.append(choice)
                self._num_open += 1
        except BaseException:
            self.cancel()
            raise

    def take(self) -> list[tuple[Choice, list[Piece]]]:
        """Return what the choices that moved since the last call have to show.

        Where more than MAX_AT_ONCE tokens wait, it takes that many and wakes the writer again.
        """
        taken = []
        self.num_new_tokens = 0
        for choice in tuple(self._dirty):
            if self.num_new_tokens >= MAX_AT_ONCE:
                break
            lag = choice.lag
            taken.append((choice, choice.take(MAX_AT_ONCE - self.num_new_tokens)))
            self.num_new_tokens += lag - choice.lag
            if choice.is_over or not choice.lag:
                del self._dirty[choice]
            if choice.error is not None:
                self.error = self.error or choice.error
                self.cancel()
            elif choice.finish_reason is not None:
                self._num_open -= 1
                self._cancel(choice)  # the workers do not know that a stop string ended it
        if self._dirty:
            self._writer.wake()
        return taken

    def cancel(self) -> None:
        """Free what every open choice holds on the workers; idempotent."""
        for choice in self.choices:
            self._cancel(choice)

    def _cancel(self, choice: Choice) -> None:
        if choice.handle is not None and choice.usage is None and choice.error is None:
            if choice.finish_reason is not None or choice.is_stopped_at_once:
                self._core.stop(choice.handle)  # a stop string ended it
            else:
                self._core.cancel(choice.handle)
        choice.handle = None

    def _on_wake(self, choice: Choice) -> None:
        if choice.is_stopped_at_once:
            self._cancel(choice)
        if choice in self._dirty:
            if choice.lag > MAX_PENDING_TOKENS:
                self._writer.overrun()
        elif choice.finish_reason is None:  # else these tokens come after a stop string
            self._dirty[choice] = None
            self._writer.wake()
