"""A completion: the core requests of one HTTP request, and the choices that answer it.

A `Choice` is the sink of one request to the core.  Its `on_…` methods only take note and wake the
writer once for however many tokens arrive together; `take` then does the work.  Every token has a
delta, because load generators count them: where text is held back (half a character, the beginning
of a stop string) the delta is empty and a later one has it.

When one choice of a `Completion` is refused or fails, the others are cancelled.  Pure: no clock, no
loop.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from msgspec import Struct, structs

from router.api.completions.deltas import Delta, ScoredToken, joined, plain, scored_prompt
from router.api.completions.response import Answer, Head
from router.api.requests.structures import Wanted
from router.core.request import Request, RequestEnd
from router.log import facts
from router.text.output_parts import CallEnd, CallStart, Part, Reader, Reasoning
from router.text.stops import StopAutomaton, StopMatcher
from router.text.tokenizer import Detokenizer, Tokenizer
from wire.errors import ErrorCode, WireError
from wire.options import Structure
from wire.payloads import STOP, Logprobs, PrefillResult, Usage

# Tokens a client may lag behind before it is cut off: some 100 KB of events, on top of the server's
# 64 KiB and the kernel's buffers, which are full by then.
MAX_PENDING_TOKENS: Final = 4096
# Calls every token by its id.
NO_TEXT: Final = Tokenizer(None)
# Tokens that are taken before others have their turn: some milliseconds, with their scores.
MAX_AT_ONCE: Final = 64

OnToken = Callable[[int, Logprobs | None], None]
NewAnswer = Callable[["Completion", Head], Answer]


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """A parsed HTTP request: its core requests, and how to show their answers.

    `requests` are for `num_choices` choices of each prompt, in that order, each with the text to
    echo before it.
    """

    tokenizer: Tokenizer
    answer: NewAnswer
    requests: Sequence[tuple[Request, str]] = ()
    num_choices: int = 1
    # The id of the responses; empty: that of the HTTP request.
    request_id: str = ""
    # Names the model and its files.
    fingerprint: str = ""
    stops: StopAutomaton | None = None
    # Stop strings in fewer tokens do not count.
    min_tokens: int = 0
    # Tokens that end an answer besides the model's own EOS.
    stop_token_ids: frozenset[int] = frozenset()
    # Whether the text includes the stop string or token that ends it.
    has_stop_text: bool = False
    # Special tokens that have a text.
    shown: frozenset[int] = frozenset()
    # Reads tool calls and reasoning in an answer; None where all of it is content.
    reader: Callable[[], Reader] | None = None
    # Whether the response includes reasoning.
    shows_reasoning: bool = True
    is_streamed: bool = True
    # Whether only the prompt is wanted, and not the token that is drawn after it.
    is_echo_only: bool = False
    has_logprobs: bool = False
    # Whether the log-probabilities begin with those of the prompt, and whether these stand alone.
    has_echo_logprobs: bool = False
    has_prompt_logprobs: bool = False
    # Whether log-probabilities call a token by its id.
    has_ids_as_names: bool = False
    # Whether pieces name their tokens.
    has_ids: bool = False
    # Whether a stream ends with its usage, and whether every event has the usage so far.
    has_usage: bool = False
    has_running_usage: bool = False
    # Whether usage includes the cost of the KV transfer.
    has_baton_usage: bool = False
    # The structure of its answers, before it is checked: see `held_to`.
    wanted: Wanted | None = None

    def held_to(self, structure: Structure) -> CompletionRequest:
        """Return this request with answers that are held to a structure."""
        requests = list[tuple[Request, str]]()
        for request, echo in self.requests:
            options = structs.replace(request.options, structure=structure)
            requests.append((structs.replace(request, options=options), echo))
        return structs.replace(self, requests=requests, wanted=None)

    @property
    def names(self) -> Tokenizer:
        """Gives tokens their text in log-probabilities."""
        return NO_TEXT if self.has_ids_as_names else self.tokenizer

    @property
    def is_eager(self) -> bool:
        """Whether tokens wake the writer before the end: for a stream, or to find stop strings."""
        return self.is_streamed or self.stops is not None


@dataclass(eq=False, slots=True)
class Choice:
    """The sink of one request.  `wake` is called when `take` has something to do.

    A faster path may take its tokens: `divert`.
    """

    index: int
    prompt: Sequence[int]
    request: CompletionRequest
    wake: Callable[[Choice], None]
    # Text that precedes the answer (`echo`).
    prefix: str = ""
    # With so many tokens it ends.
    max_tokens: int = sys.maxsize

    handle: int | None = None
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    # The stop string, or stop token of the request, that ended it.
    stop_reason: str | int | None = None
    error: WireError | None = None
    usage: Usage | None = None
    end: RequestEnd | None = None

    _pending: list[int] = field(default_factory=list)
    # The last token, until the end comes that it goes out with.
    _last: list[int] = field(default_factory=list)
    _logprobs: list[Logprobs | None] = field(default_factory=list)
    _prompt_logprobs: bytes | None = None
    _scores: list[ScoredToken] = field(default_factory=list)
    _prompt_scores: Sequence[ScoredToken] = ()
    _length: int = 0
    _decoder: Detokenizer = field(init=False)
    _stops: StopMatcher | None = field(init=False)
    _reader: Reader | None = field(init=False)
    _num_parts: Counter[type[Part]] = field(default_factory=Counter)
    # The text that came last is reasoning.
    _is_reasoning: bool = False
    # Its tokens show nothing but their text, in which nothing is looked for.
    is_plain: bool = field(init=False)
    _is_eager: bool = field(init=False)
    # `_note`, or the faster path.
    on_token: OnToken = field(init=False)
    # `wake`, as it was before the tokens were diverted.
    _own_wake: Callable[[Choice], None] | None = None

    def __post_init__(self) -> None:
        self.on_token = self._note
        self._decoder = self.request.tokenizer.detokenizer(self.prompt, self.request.shown)
        self._stops = StopMatcher(self.request.stops) if self.request.stops else None
        self._reader = self.request.reader() if self.request.reader else None
        request, self._is_eager = self.request, self.request.is_eager
        has_scores = request.has_logprobs or request.has_prompt_logprobs
        self.is_plain = not (request.stops or request.has_ids or has_scores or request.reader)
        self._length = len(self.prefix)

    @property
    def is_over(self) -> bool:
        """Nothing more will come out of `take`."""
        return self.finish_reason is not None or (self.error is not None and not self._pending)

    @property
    def lag(self) -> int:
        """Tokens that have come and can be taken."""
        return len(self._pending)

    @property
    def awaits_second_token(self) -> bool:
        """Whether only the first token has arrived and more will follow."""
        return not self.num_tokens and self.lag == 1 and self._awaits_end

    @property
    def _awaits_end(self) -> bool:
        return self.usage is None and self.error is None

    # The sink.

    def on_prefill(self, result: PrefillResult, kv_bytes: int) -> None:
        self.cached_tokens = result.cached_tokens
        self._prompt_logprobs = result.prompt_logprobs
        # The token of "stop" is EOS, which has no text.
        if not self.request.is_echo_only and result.finish_reason != "stop":
            self.on_token(result.token_id, result.logprobs)

    def _note(self, token_id: int, logprobs: Logprobs | None) -> None:
        pending = self._pending
        pending.append(token_id)
        if not self.is_plain and self.request.has_logprobs:
            self._logprobs.append(logprobs)
        # Of several tokens only the first wakes; then those that are far too many.
        if self._is_eager and not 1 < len(pending) <= MAX_PENDING_TOKENS:
            self.wake(self)

    def on_done(self, usage: Usage) -> None:
        self.usage = usage
        self._pending += self._last
        self.wake(self)

    def on_error(self, error: WireError) -> None:
        self.error = error
        self._pending += self._last
        self.wake(self)

    def on_end(self, end: RequestEnd) -> None:
        self.end = end

    # The writer.

    def take(self, max_tokens: int = sys.maxsize) -> list[Delta]:
        """Return the pieces of the next `max_tokens`; the last one of all has the finish reason.
        When this ends the choice by a stop string, the caller must cancel `handle`.
        """
        if self.finish_reason is not None:
            self._pending.clear()
            return []
        token_ids, self._pending = self._pending, []
        if len(token_ids) > max_tokens:
            token_ids, self._pending = token_ids[:max_tokens], token_ids[max_tokens:]
        if self.num_tokens + len(token_ids) >= self.max_tokens and self._awaits_end:
            self._last = [token_ids.pop()]
        if self.is_plain:
            self.num_tokens += len(token_ids)
            pieces = list(map(plain, self._decoder.feed_all(token_ids)))
        else:
            pieces = self._take(token_ids)
        if self.usage is not None and self.finish_reason is None and not self._pending:
            self._end(pieces, self.usage)
        return pieces

    @property
    def num_divertible(self) -> int:
        """How many of the next tokens show nothing but their text; the last one shows the end."""
        is_idle = self.is_plain and self._awaits_end and not self._pending
        return self.max_tokens - self.num_tokens - 1 if is_idle else 0

    def divert(
        self, on_token: OnToken, on_other: Callable[[Choice], None]
    ) -> Callable[[int], bytes]:
        """Give the next `num_divertible` tokens to `on_token`; call `on_other` for anything else.

        Return the function that makes a JSON string of each token.
        """
        self._own_wake = self.wake
        self.on_token, self.wake = on_token, on_other
        return self._decoder.feed_json

    def end_diversion(self, num_taken: int) -> None:
        """Take tokens again, after so many that were diverted."""
        assert self._own_wake is not None
        self.num_tokens += num_taken
        self.on_token, self.wake = self._note, self._own_wake
        self.wake(self)

    def let_go(self) -> None:
        """Drop references after the last token, so that no cycle is left to the collector."""
        del self.on_token, self.wake, self._own_wake

    def _take(self, token_ids: list[int]) -> list[Delta]:
        """The pieces of tokens that have more to show than text, or are looked at for stops."""
        if self._prompt_logprobs is not None:
            packed, self._prompt_logprobs = self._prompt_logprobs, None
            scores = scored_prompt(self.request.tokenizer, self.prompt, packed, self.prefix)
            self._scores = scores if self.request.has_echo_logprobs else []
            self._prompt_scores = scores if self.request.has_prompt_logprobs else ()
        num_tokens = len(token_ids)
        logprobs, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        request, pieces = self.request, list[Delta]()
        for position, token_id in enumerate(token_ids):
            text = self._text_of(token_id)
            if request.has_logprobs:
                self._scores.append(ScoredToken(token_id, logprobs[position], self._length))
            self._length += len(text)
            pieces.append(self._piece(text, [token_id] if request.has_ids else ()))
            self.num_reasoning_tokens += self._is_reasoning
            if self._stops is not None and self._stops.is_stopped:
                self._finish(pieces, Delta(""), "stop", self._stops.stop)
                break
        return pieces

    def _end(self, pieces: list[Delta], usage: Usage) -> None:
        """The workers have ended it."""
        request, text, stop_token = self.request, self._rest(), usage.stop_token_id
        if self._stops is not None and self._stops.is_stopped:
            self._finish(pieces, self._piece(text), "stop", self._stops.stop)
        elif request.is_echo_only or usage.finish_reason != STOP:
            self._finish(pieces, self._piece(text), "length")
        elif stop_token is None:
            self.num_tokens += 1  # EOS counts, though workers do not send it.
            self._finish(pieces, self._piece(text), STOP)
        else:
            self.num_tokens += 1
            if request.has_logprobs:
                self._scores.append(ScoredToken(stop_token, usage.stop_logprobs, self._length))
            if request.has_stop_text:
                text += self._decoder.feed(stop_token) + self._decoder.flush()
            piece = self._piece(text, [stop_token] if request.has_ids else ())
            is_own = stop_token in request.stop_token_ids
            self._finish(pieces, piece, STOP, stop_token if is_own else None)

    def _text_of(self, token_id: int) -> str:
        self.num_tokens += 1
        text = self._decoder.feed(token_id)
        if self._stops is not None and self.num_tokens > self.request.min_tokens:
            return self._until_stop(self._stops, text)
        return text

    def _until_stop(self, stops: StopMatcher, text: str) -> str:
        text = stops.feed(text)
        return text + stops.stop if stops.stop and self.request.has_stop_text else text

    def _rest(self) -> str:
        text = self._decoder.flush()
        if self._stops is None:
            return text
        return self._until_stop(self._stops, text) + self._stops.flush()

    def _piece(self, text: str, token_ids: Sequence[int] = ()) -> Delta:
        scores, self._scores = self._scores, []
        parts = None if self._reader is None else self._noted(self._reader.feed(text))
        prompt_scores, self._prompt_scores = self._prompt_scores, ()
        return Delta(text, token_ids, scores, None, parts, prompt_scores)

    def _noted(self, parts: list[Part]) -> list[Part]:
        if parts:
            self._num_parts.update(map(type, parts))
            self._is_reasoning = isinstance(parts[-1], Reasoning)
        if not self.request.shows_reasoning:
            return [part for part in parts if not isinstance(part, Reasoning)]
        return parts

    def _finish(
        self, pieces: list[Delta], last: Delta, reason: str, stop_reason: str | int | None = None
    ) -> None:
        # The end goes out with the last token where possible: clients take each event for a token.
        ending = [*pieces[-1:], last]
        del pieces[-1:]
        if self._reader is not None:
            ending.append(Delta("", parts=self._noted(self._reader.flush())))
        are_finished = 0 < self._num_parts[CallStart] == self._num_parts[CallEnd]
        self.finish_reason = "tool_calls" if are_finished and reason == STOP else reason
        self.stop_reason = stop_reason
        pieces.append(joined(ending)._replace(finish_reason=self.finish_reason))


class Core(Protocol):
    """The part of `router.core.dispatcher.Dispatcher` that is used here."""

    def submit(self, request: Request, sink: Choice) -> int: ...
    def cancel(self, handle: int, code: ErrorCode = ErrorCode.CANCELLED) -> None: ...
    def stop(self, handle: int) -> None: ...


class Writer(Protocol):
    """The writer of the response."""

    def wake(self) -> None:
        """There is something to take."""

    def write(self) -> None:
        """Write pending events at once."""

    def overrun(self) -> None:
        """A choice has more untaken tokens than anyone should let pile up."""


class Completion:
    """The choices of one HTTP request, submitted together and ended together."""

    def __init__(self, core: Core, request: CompletionRequest, writer: Writer) -> None:
        self.request = request
        self._core = core
        self._writer = writer
        self._dirty: dict[Choice, None] = {}
        self._num_open = 0
        self.choices: list[Choice] = []
        self.error: WireError | None = None
        self.is_over = False  # all choices have ended, or one of them badly
        # Tokens that the last `take` took.
        self.num_new_tokens = 0

    @property
    def outcome(self) -> str:
        """Why it ended, in one word for the log."""
        if self.error is not None:
            return self.error.code.label
        return min((one.finish_reason for one in self.choices if one.finish_reason), default="ok")

    @property
    def facts(self) -> dict[str, Any]:
        """The completion's fields of the log line."""
        ends = [choice.end for choice in self.choices if choice.end is not None]
        return {"choices": len(self.choices), **facts(ends)}

    def submit(self) -> None:
        """Submit every request.

        Raises:
            WireError: One was refused.  Whatever is raised, none is left running.
        """
        try:
            for index, (request, prefix) in enumerate(self.request.requests):
                limit = request.options.max_tokens or sys.maxsize
                choice = Choice(
                    index, request.token_ids, self.request, self._on_wake, prefix, limit
                )
                self.choices.append(choice)
                choice.handle = self._core.submit(request, choice)
                self._num_open += 1
        except BaseException:
            self.cancel()
            self.let_go()
            raise

    def take(self) -> list[tuple[Choice, list[Delta]]]:
        """Return what the choices that moved since the last call have to show.
        Where more than MAX_AT_ONCE tokens wait, it takes that many and wakes the writer again.
        """
        taken, num_left = [], MAX_AT_ONCE
        for choice in tuple(self._dirty):
            lag = choice.lag
            taken.append((choice, choice.take(num_left)))
            if lag <= num_left or choice.is_over:
                del self._dirty[choice]
            if choice.is_over:
                self._close(choice)
            num_left = max(num_left - lag, 0)
            if not num_left:
                break
        self.num_new_tokens = MAX_AT_ONCE - num_left
        if self._dirty:
            self._writer.wake()
        return taken

    def _close(self, choice: Choice) -> None:
        if choice.error is not None:
            self.error = self.error or choice.error
            self.cancel()
        else:
            self._num_open -= 1
            self._cancel(choice)  # the workers do not know that a stop string ended it
        self.is_over = self._num_open == 0 or self.error is not None

    def cancel(self) -> None:
        """Free what every open choice holds on the workers; idempotent."""
        for choice in self.choices:
            self._cancel(choice)

    def let_go(self) -> None:
        """Nobody asks for more, after `cancel`."""
        for choice in self.choices:
            choice.let_go()

    def _cancel(self, choice: Choice) -> None:
        if choice.handle is not None and choice.usage is None and choice.error is None:
            if choice.finish_reason is not None:
                self._core.stop(choice.handle)  # a stop string ended it
            else:
                self._core.cancel(choice.handle)
        choice.handle = None

    def _on_wake(self, choice: Choice) -> None:
        if choice in self._dirty:
            if choice.lag > MAX_PENDING_TOKENS:
                self._writer.overrun()
        elif choice.finish_reason is None:  # else these tokens come after a stop string
            self._dirty[choice] = None
            # The first token goes out before the core asks a decode worker for the next, and asks
            # none if that token ends the choice.
            (self._writer.write if choice.awaits_second_token else self._writer.wake)()
