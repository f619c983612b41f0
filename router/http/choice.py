"""One choice of a completion: the tokens that come in, the text that may go out.

A `Choice` is the sink of one request.  Its `on_…` methods only take note and wake the writer once
for however many tokens arrive together; `take` then does the work: text, stop strings, end.
Tokens whose text is held back (half a character, the beginning of a stop string) travel with the
next text, so every piece but the last shows something.

Pure: no clock, no loop.  What a piece looks like on the network is `router.http.sse` and
`router.http.responses`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from router.core.request import RequestEnd
from router.text.stops import StopAutomaton, StopMatcher
from router.text.tokenizer import Tokenizer
from wire.errors import WireError
from wire.logprobs import unpack_prompt_logprobs
from wire.payloads import Logprobs, PrefillResult, Usage

# Tokens a client may lag behind before it is cut off: some 100 KB of events, beyond the 64 KiB and
# the kernel's buffers that are full by then.
MAX_PENDING_TOKENS: Final = 4096


class ScoredToken(NamedTuple):
    """A token with its log-probabilities and where its text starts in the choice's text.

    A prompt's first token has none: nothing precedes it.
    """

    token_id: int
    logprobs: Logprobs | None
    text_offset: int


class Piece(NamedTuple):
    """What one event shows: text, on the last one why it ended, and if asked for the tokens."""

    text: str
    token_ids: Sequence[int] = ()
    scores: Sequence[ScoredToken] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What every choice of one HTTP request has in common."""

    tokenizer: Tokenizer
    stops: StopAutomaton | None = None
    min_tokens: int = 0
    has_logprobs: bool = False
    # Whether only the prompt is wanted, and not the token that is drawn after it.
    is_echo_only: bool = False
    # Whether pieces name their tokens.
    has_ids: bool = False
    # False: nobody looks before the end, so nobody is woken before it.
    is_eager: bool = True


@dataclass(eq=False, slots=True)
class Choice:
    """The sink of one request.  `wake` is called when `take` has something to do."""

    index: int
    prompt: Sequence[int]
    output: OutputOptions
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
    # The first token ended it: whoever is woken can spare the decode worker the request.
    is_stopped_at_once: bool = False

    _pending: list[int] = field(default_factory=list)
    _logprobs: list[Logprobs | None] = field(default_factory=list)
    _prompt_logprobs: bytes | None = None
    _held: list[int] = field(default_factory=list)
    _scores: list[ScoredToken] = field(default_factory=list)
    _length: int = 0
    _feed: Callable[[int], str] = field(init=False)
    _flush: Callable[[], str] = field(init=False)
    _stops: StopMatcher | None = field(init=False)
    _is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        detokenizer = self.output.tokenizer.detokenizer(self.prompt)
        self._feed, self._flush = detokenizer.feed, detokenizer.flush
        self._stops = StopMatcher(self.output.stops) if self.output.stops else None
        self._is_plain = not (self.output.stops or self.output.has_ids or self.output.has_logprobs)
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
        if self.output.is_echo_only:
            return
        if result.finish_reason != "stop":  # Then the token is the end sign, not text.
            self.is_stopped_at_once = self._stops_at(result.token_id)
            self.on_token(result.token_id, result.logprobs)

    def on_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        self._pending.append(token_id)
        if self.output.has_logprobs:
            self._logprobs.append(logprobs)
        if self.output.is_eager:
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
        """Return what `max_tokens` show; the last piece of all carries the finish reason.

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
            reason = "length" if self.output.is_echo_only else self.usage.finish_reason
            self._finish(pieces, rest, "stop" if is_stopped else reason)
        return pieces

    def _take_plain(self, token_ids: list[int]) -> list[Piece]:
        """What `_take` does when there is only text to show: the path of most tokens."""
        self.num_tokens += len(token_ids)
        texts = map(self._feed, token_ids)
        return [Piece(text) for text in texts if text or not self.output.tokenizer.has_text]

    def _take(self, token_ids: list[int]) -> list[Piece]:
        num_tokens = len(token_ids)
        logprobs, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        output, pieces = self.output, list[Piece]()
        for position, token_id in enumerate(token_ids):
            text = self._text_of(token_id)
            if output.has_logprobs:
                self._scores.append(ScoredToken(token_id, logprobs[position], self._length))
            if output.has_ids:
                self._held.append(token_id)
            self._length += len(text)
            if text or not output.tokenizer.has_text:
                pieces.append(self._piece(text))
            if self._stops is not None and self._stops.is_stopped:
                self._finish(pieces, "", "stop")
                break
        return pieces

    def _take_prompt_scores(self, packed: bytes) -> list[ScoredToken]:
        rows = [None, *unpack_prompt_logprobs(packed)]
        feed = self.output.tokenizer.detokenizer().feed
        scores, offset = list[ScoredToken](), 0
        for token_id, logprobs in zip(self.prompt, rows, strict=False):
            scores.append(ScoredToken(token_id, logprobs, min(offset, len(self.prefix))))
            offset += len(feed(token_id))
        return scores

    def _stops_at(self, token_id: int) -> bool:
        """Whether the first token alone contains a stop string."""
        if self.output.stops is None or self.output.min_tokens:
            return False
        matcher = StopMatcher(self.output.stops)
        matcher.feed(self.output.tokenizer.detokenizer(self.prompt).feed(token_id))
        return matcher.is_stopped

    def _text_of(self, token_id: int) -> str:
        self.num_tokens += 1
        text = self._feed(token_id)
        if self._stops is not None and self.num_tokens > self.output.min_tokens:
            return self._stops.feed(text)
        return text

    def _rest(self) -> str:
        text = self._flush()
        if self._stops is None:
            return text
        text = self._stops.feed(text)
        return text if self._stops.is_stopped else text + self._stops.flush()

    def _piece(self, text: str, finish_reason: str | None = None) -> Piece:
        piece = Piece(text, self._held, self._scores, finish_reason)
        self._held, self._scores = [], []
        return piece

    def _finish(self, pieces: list[Piece], text: str, reason: str) -> None:
        # The end goes out with the last token where possible: clients time one event a token.
        self.finish_reason = reason
        rest = self._piece(text, reason)
        if pieces:
            last = pieces.pop()
            rest = Piece(
                last.text + rest.text,
                [*last.token_ids, *rest.token_ids],
                [*last.scores, *rest.scores],
                reason,
            )
        pieces.append(rest)
