"""The open requests of a `ServingEngine`, and their results.

The thread that ends a request first removes it from the table.  So a callback gets exactly one
final output, and nothing after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Final, Literal

import structlog

from wire.errors import WireError
from wire.payloads import Logprobs
from worker.engine.outputs import Token

log = structlog.get_logger("worker")

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_RESULTS: Final = 4096


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token, the end of the request, or both.

    `token_id` is None if the request ends without another token; a stop token is not part of the
    output.  `prompt_logprobs` come with the first token, packed as in `wire.logprobs`.  `error`
    is set if `finish_reason` is "cancelled" or "error".
    """

    request_id: int
    token_id: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: bytes | None = None
    finish_reason: FinishReason | None = None
    error: WireError | None = None

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Result:
    request_id: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: WireError | None = None


Callback = Callable[[TokenOutput], object]


@dataclass(slots=True)
class Request:
    """A request that has not finished."""

    request_id: int
    prompt_tokens: int
    callback: Callback | None
    token_ids: list[int] = field(default_factory=list)

    def deliver(self, output: TokenOutput) -> TokenOutput:
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        if self.callback is not None:
            try:
                self.callback(output)
            except Exception:  # other requests must still get their tokens
                log.exception("a callback raised", request=self.request_id)
        return output


class Ledger:
    """Table of open requests and the latest results; `ends` counts requests by finish reason."""

    def __init__(self, max_results: int = MAX_RESULTS) -> None:
        self._max_results = max_results
        self.ends: dict[FinishReason, int] = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
        self.closed: WireError | None = None
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self._ids = count(1)
        self._lock = Lock()
        self._open: dict[int, Request] = {}
        self._results: dict[int, Result] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, prompt_tokens: int, callback: Callback | None) -> int:
        """Add a request and return its id.  After `close`, raise the WireError passed to it."""
        with self._lock:
            if self.closed is not None:
                raise WireError(self.closed.code, self.closed.message) from self.closed
            request = Request(next(self._ids), prompt_tokens, callback)
            self._open[request.request_id] = request
            self.num_prompt_tokens += prompt_tokens
        return request.request_id

    def result(self, request_id: int) -> Result | None:
        return self._results.get(request_id)

    def on_token(self, token: Token) -> TokenOutput | None:
        """Deliver a token to its request; a token with a finish reason ends the request."""
        token_id = None if token.finish_reason == "stop" else token.token_id
        return self._deliver(
            TokenOutput(
                request_id=token.request_id,
                token_id=token_id,
                logprobs=token.logprobs,
                prompt_logprobs=token.prompt_logprobs,
                finish_reason=token.finish_reason,
            )
        )

    def end(
        self, request_id: int, finish_reason: FinishReason, error: WireError
    ) -> TokenOutput | None:
        """End an open request with an error."""
        return self._deliver(TokenOutput(request_id, finish_reason=finish_reason, error=error))

    def close(self, finish_reason: FinishReason, error: WireError) -> None:
        """End every request with an error, and make `open` raise that error from now on."""
        with self._lock:
            self.closed = self.closed or error
            request_ids = list(self._open)
        for request_id in request_ids:
            self.end(request_id, finish_reason, error)

    def _deliver(self, output: TokenOutput) -> TokenOutput | None:
        with self._lock:
            request = self._open.get(output.request_id)
            if request is None:
                return None
            self.num_tokens += output.token_id is not None
            if output.is_final:
                del self._open[output.request_id]
                self._store(request, output)
        return request.deliver(output)

    def _store(self, request: Request, output: TokenOutput) -> None:
        """Store the result of a request; called before its final callback."""
        assert output.finish_reason is not None
        self.ends[output.finish_reason] += 1
        last = () if output.token_id is None else (output.token_id,)
        self._results[request.request_id] = Result(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            token_ids=(*request.token_ids, *last),
            finish_reason=output.finish_reason,
            error=output.error,
        )
        if len(self._results) > self._max_results:
            del self._results[next(iter(self._results))]
