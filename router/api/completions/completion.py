"""A completion: the core requests of one HTTP request, and a choice for each of them.

A `Choice` is the sink of one core request.  Its `on_…` methods only store what arrives and wake the
writer once per burst of tokens; `take` then decodes them.  Every token gets a delta, because load
generators count deltas.  If its text is not certain yet (half a character, or the beginning of a
stop string), the delta is empty and a later one has the text.

If one choice of a `Completion` is refused or fails, the others are cancelled.  There is no clock
and no event loop here.
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

# How many tokens a slow reader may lag behind before it is disconnected: about 100 KB of events.
# The server's 64 KiB buffer and the kernel's buffers are full by then.
MAX_PENDING_TOKENS: Final = 4096
# Names every token by its id.
NO_TEXT: Final = Tokenizer(None)
# The maximum number of tokens per `Completion.take`: a few ms of work with log-probabilities.
MAX_AT_ONCE: Final = 64

OnToken = Callable[[int, Logprobs | None], None]
NewAnswer = Callable[["Completion", Head], Answer]


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """A parsed HTTP request: its core requests, and the options for rendering their answers.

    `requests` has `num_choices` consecutive entries for each prompt: a core request and the text to
    echo before its answer.
    """

    tokenizer: Tokenizer
    answer: NewAnswer
    requests: Sequence[tuple[Request, str]] = ()
    num_choices: int = 1
    # The id of the response; empty for that of the HTTP request.
    request_id: str = ""
    # `system_fingerprint`: a hash of the model files.
    fingerprint: str = ""
    stops: StopAutomaton | None = None
    # Stop strings in the first `min_tokens` tokens are ignored.
    min_tokens: int = 0
    # Tokens that end an answer, besides EOS.
    stop_token_ids: frozenset[int] = frozenset()
    # Whether the text includes the stop string or stop token that ended it.
    has_stop_text: bool = False
    # Special tokens whose text is part of the answer.
    shown: frozenset[int] = frozenset()
    # Creates a parser for tool calls and reasoning; None if the whole answer is content.
    reader: Callable[[], Reader] | None = None
    # Whether the response includes reasoning.
    shows_reasoning: bool = True
    is_streamed: bool = True
    # Whether to return only the prompt, without the token that workers always generate.
    is_echo_only: bool = False
    has_logprobs: bool = False
    # Whether `logprobs` begins with the prompt, and whether there is `prompt_logprobs`.
    has_echo_logprobs: bool = False
    has_prompt_logprobs: bool = False
    # Whether log-probabilities name a token by its id.
    has_ids_as_names: bool = False
    # Whether the response has token ids.
    has_ids: bool = False
    # Whether a stream ends with its usage, and whether every event has the usage so far.
    has_usage: bool = False
    has_running_usage: bool = False
    # Whether usage includes the cost of the KV transfer.
    has_baton_usage: bool = False
    # The requested structure, not yet validated: see `constrained_to`.
    wanted: Wanted | None = None

    def constrained_to(self, structure: Structure) -> CompletionRequest:
        """Return a copy of this request whose output is constrained to `structure`."""
        requests = list[tuple[Request, str]]()
        for request, echo in self.requests:
            options = structs.replace(request.options, structure=structure)
            requests.append((structs.replace(request, options=options), echo))
        return structs.replace(self, requests=requests, wanted=None)

    @property
    def names(self) -> Tokenizer:
        """The tokenizer that names tokens in log-probabilities."""
        return NO_TEXT if self.has_ids_as_names else self.tokenizer

    @property
    def is_eager(self) -> bool:
        """Whether each burst of tokens wakes the writer: to stream it, or to find stop strings."""
        return self.is_streamed or self.stops is not None


@dataclass(eq=False, slots=True)
class Choice:
    """The sink of one core request.  It calls `wake` when there is something to `take`.

    `divert` sends its tokens to a faster path.
    """

    index: int
    prompt: Sequence[int]
    request: CompletionRequest
    wake: Callable[[Choice], None]
    # Text to return before the answer (`echo`).
    prefix: str = ""
    # The answer ends after this number of tokens.
    max_tokens: int = sys.maxsize

    handle: int | None = None
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    # The stop string or stop token of the request that ended the answer.
    stop_reason: str | int | None = None
    error: WireError | None = None
    usage: Usage | None = None
    end: RequestEnd | None = None

    _pending: list[int] = field(default_factory=list)
    # The last token, kept until its DONE or ERROR arrives: both go into one event.
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
    # Whether the latest text is reasoning.
    _is_reasoning: bool = False
    # Whether a token contributes only its text, which is not searched for stop strings or calls.
    is_plain: bool = field(init=False)
    _is_eager: bool = field(init=False)
    # `_store`, or the faster path.
    on_token: OnToken = field(init=False)
    # The original `wake`, restored by `end_diversion`.
    _own_wake: Callable[[Choice], None] | None = None

    def __post_init__(self) -> None:
        self.on_token = self._store
        self._decoder = self.request.tokenizer.detokenizer(self.prompt, self.request.shown)
        self._stops = StopMatcher(self.request.stops) if self.request.stops else None
        self._reader = self.request.reader() if self.request.reader else None
        request, self._is_eager = self.request, self.request.is_eager
        has_scores = request.has_logprobs or request.has_prompt_logprobs
        self.is_plain = not (request.stops or request.has_ids or has_scores or request.reader)
        self._length = len(self.prefix)

    @property
    def is_over(self) -> bool:
        """Whether `take` will return nothing more."""
        return self.finish_reason is not None or (self.error is not None and not self._pending)

    @property
    def lag(self) -> int:
        """The number of received tokens that have not been taken."""
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
        # With "stop", the token is EOS, which has no text.
        if not self.request.is_echo_only and result.finish_reason != "stop":
            self.on_token(result.token_id, result.logprobs)

    def _store(self, token_id: int, logprobs: Logprobs | None) -> None:
        pending = self._pending
        pending.append(token_id)
        if not self.is_plain and self.request.has_logprobs:
            self._logprobs.append(logprobs)
        # Wake for the first token of a burst only, or if far too many are pending.
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
        """Return the deltas of up to `max_tokens` tokens; the final delta has the finish reason.

        If a stop string ends the choice, the caller must stop the core request `handle`.
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
            deltas = list(map(plain, self._decoder.feed_all(token_ids)))
        else:
            deltas = self._take(token_ids)
        if self.usage is not None and self.finish_reason is None and not self._pending:
            self._end(deltas, self.usage)
        return deltas

    @property
    def num_divertible(self) -> int:
        """How many of the next tokens contribute only their text; the last one has the end."""
        is_idle = self.is_plain and self._awaits_end and not self._pending
        return self.max_tokens - self.num_tokens - 1 if is_idle else 0

    def divert(
        self, on_token: OnToken, on_other: Callable[[Choice], None]
    ) -> Callable[[int], bytes]:
        """Pass the next `num_divertible` tokens to `on_token`, a fast path for plain text.

        An end, an error or any other event calls `on_other` instead of `wake`, until
        `end_diversion`.  Return a function that decodes a token to a JSON string.
        """
        self._own_wake = self.wake
        self.on_token, self.wake = on_token, on_other
        return self._decoder.feed_json

    def end_diversion(self, num_taken: int) -> None:
        """Receive tokens here again, after `num_taken` diverted ones."""
        assert self._own_wake is not None
        self.num_tokens += num_taken
        self.on_token, self.wake = self._store, self._own_wake
        self.wake(self)

    def drop_callbacks(self) -> None:
        """Drop the callbacks after the last token, to break reference cycles."""
        del self.on_token, self.wake, self._own_wake

    def _take(self, token_ids: list[int]) -> list[Delta]:
        """Return the deltas of tokens that contribute more than text or may complete a stop."""
        if self._prompt_logprobs is not None:
            packed, self._prompt_logprobs = self._prompt_logprobs, None
            scores = scored_prompt(self.request.tokenizer, self.prompt, packed, self.prefix)
            self._scores = scores if self.request.has_echo_logprobs else []
            self._prompt_scores = scores if self.request.has_prompt_logprobs else ()
        num_tokens = len(token_ids)
        logprobs, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        request, deltas = self.request, list[Delta]()
        for position, token_id in enumerate(token_ids):
            text = self._text_of(token_id)
            if request.has_logprobs:
                self._scores.append(ScoredToken(token_id, logprobs[position], self._length))
            self._length += len(text)
            deltas.append(self._delta(text, [token_id] if request.has_ids else ()))
            self.num_reasoning_tokens += self._is_reasoning
            if self._stops is not None and self._stops.is_stopped:
                self._finish(deltas, Delta(""), "stop", self._stops.stop)
                break
        return deltas

    def _end(self, deltas: list[Delta], usage: Usage) -> None:
        """Append the final delta after the workers have finished the request."""
        request, text, stop_token = self.request, self._rest(), usage.stop_token_id
        if self._stops is not None and self._stops.is_stopped:
            self._finish(deltas, self._delta(text), "stop", self._stops.stop)
        elif request.is_echo_only or usage.finish_reason != STOP:
            self._finish(deltas, self._delta(text), "length")
        elif stop_token is None:
            self.num_tokens += 1  # EOS counts, though workers do not send it.
            self._finish(deltas, self._delta(text), STOP)
        else:
            self.num_tokens += 1
            if request.has_logprobs:
                self._scores.append(ScoredToken(stop_token, usage.stop_logprobs, self._length))
            if request.has_stop_text:
                text += self._decoder.feed(stop_token) + self._decoder.flush()
            delta = self._delta(text, [stop_token] if request.has_ids else ())
            is_own = stop_token in request.stop_token_ids
            self._finish(deltas, delta, STOP, stop_token if is_own else None)

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

    def _delta(self, text: str, token_ids: Sequence[int] = ()) -> Delta:
        scores, self._scores = self._scores, []
        parts = None if self._reader is None else self._visible(self._reader.feed(text))
        prompt_scores, self._prompt_scores = self._prompt_scores, ()
        return Delta(text, token_ids, scores, None, parts, prompt_scores)

    def _visible(self, parts: list[Part]) -> list[Part]:
        """Count `parts`, and return those that the response includes."""
        if parts:
            self._num_parts.update(map(type, parts))
            self._is_reasoning = isinstance(parts[-1], Reasoning)
        if not self.request.shows_reasoning:
            return [part for part in parts if not isinstance(part, Reasoning)]
        return parts

    def _finish(
        self, deltas: list[Delta], last: Delta, reason: str, stop_reason: str | int | None = None
    ) -> None:
        # Merge the end into the last token's delta if possible: clients count an event as a token.
        ending = [*deltas[-1:], last]
        del deltas[-1:]
        if self._reader is not None:
            ending.append(Delta("", parts=self._visible(self._reader.flush())))
        are_finished = 0 < self._num_parts[CallStart] == self._num_parts[CallEnd]
        self.finish_reason = "tool_calls" if are_finished and reason == STOP else reason
        self.stop_reason = stop_reason
        deltas.append(joined(ending)._replace(finish_reason=self.finish_reason))


class Core(Protocol):
    """The part of `router.core.dispatcher.Dispatcher` that completions use."""

    def submit(self, request: Request, sink: Choice) -> int: ...
    def cancel(self, handle: int, code: ErrorCode = ErrorCode.CANCELLED) -> None: ...
    def stop(self, handle: int) -> None: ...


class Writer(Protocol):
    """The part of `router.http.writer.ResponseWriter` that completions use."""

    def wake(self) -> None:
        """Schedule a write: a choice has tokens to take."""

    def write(self) -> None:
        """Write pending events immediately."""

    def overrun(self) -> None:
        """Disconnect the client: it lags more than MAX_PENDING_TOKENS behind."""


class Completion:
    """The choices of one HTTP request, submitted and cancelled together."""

    def __init__(self, core: Core, request: CompletionRequest, writer: Writer) -> None:
        self.request = request
        self._core = core
        self._writer = writer
        self._dirty: dict[Choice, None] = {}
        self._num_open = 0
        self.choices: list[Choice] = []
        self.error: WireError | None = None
        self.is_over = False  # all choices have finished, or one has failed
        # The number of tokens that the last `take` returned.
        self.num_new_tokens = 0

    @property
    def outcome(self) -> str:
        """The finish reason or error code, for the log."""
        if self.error is not None:
            return self.error.code.label
        return min((one.finish_reason for one in self.choices if one.finish_reason), default="ok")

    @property
    def facts(self) -> dict[str, Any]:
        """The fields that the completion adds to the request's log line."""
        ends = [choice.end for choice in self.choices if choice.end is not None]
        return {"choices": len(self.choices), **facts(ends)}

    def submit(self) -> None:
        """Submit every core request; if one fails, cancel those already submitted.

        Raises:
            WireError: A request was refused.
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
            self.drop_callbacks()
            raise

    def take(self) -> list[tuple[Choice, list[Delta]]]:
        """Return the deltas of all choices that changed since the last call.

        If more than MAX_AT_ONCE tokens wait, return that many and wake the writer again.
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
            self._cancel(choice)  # a stop string may have ended it before the workers do
        self.is_over = self._num_open == 0 or self.error is not None

    def cancel(self) -> None:
        """Cancel every unfinished choice, which frees its blocks on the workers.  Idempotent."""
        for choice in self.choices:
            self._cancel(choice)

    def drop_callbacks(self) -> None:
        """Break reference cycles after `cancel`."""
        for choice in self.choices:
            choice.drop_callbacks()

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
            # Write the first token before the core sends the request to a decode worker: if the
            # token completes a stop string, no decode worker is needed.
            (self._writer.write if choice.awaits_second_token else self._writer.wake)()
