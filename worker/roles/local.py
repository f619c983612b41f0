"""Local requests: the worker that generates prefills the prompt itself; no KV is transferred.

PREFILL_REQUEST has this worker's own rank.  The engine prefills the prompt and continues to
generate; PREFILL_DONE carries the first token, and no DECODE_REQUEST follows.  SPEC 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from wire.errors import ErrorCode, WireError
from wire.frames import PrefillRequest
from wire.parts import Message
from wire.payloads import STOP, decode_prompt
from wire.process.log import bind_trace
from worker.engine.engine import Engine
from worker.engine.outputs import Started, Timed, Token
from worker.engine.sequence import Sequence
from worker.link import RouterLink
from worker.roles.results import Steps, Timing, send_first, usage_of

Post = Callable[[Callable[[Engine], None]], object]


@dataclass(slots=True, eq=False)
class LocalRequest:
    """One local request, from PREFILL_REQUEST to its last token."""

    router: RouterLink
    request_id: int
    timing: Timing
    cached_tokens: int = 0
    num_tokens: int = 0


class LocalRequests:
    """All local requests of this worker.  Runs on the event loop."""

    def __init__(
        self,
        post: Post,
        on_failed: Callable[[LocalRequest, WireError], None],
        clock: Callable[[], float],
    ) -> None:
        self._post = post
        self._clock = clock
        self._on_failed = on_failed
        self._requests: dict[int, LocalRequest] = {}

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> Set[int]:
        return self._requests.keys()

    def add(self, router: RouterLink, frame: PrefillRequest, message: Message) -> None:
        """Add a prompt to the engine.  Raises WireError for an invalid payload."""
        token_ids, options = decode_prompt(message.body(), frame.seq_len)
        bind_trace(frame.request_id, options.trace_id)
        if options.max_tokens is None:
            text = "PREFILL_REQUEST with the rank of its own receiver needs max_tokens"
            raise WireError(ErrorCode.PROTOCOL, text)
        self._requests[frame.request_id] = LocalRequest(
            router, frame.request_id, Timing(self._clock)
        )
        sequence = Sequence(frame.request_id, token_ids, options)
        self._post(lambda engine: engine.add(sequence))

    def cancel(self, request_id: int) -> None:
        """Cancel a request; unknown ids are ignored."""
        if self._requests.pop(request_id, None) is not None:
            self._post(lambda engine: engine.cancel(request_id))

    def on_router_lost(self, router: RouterLink) -> None:
        for request in list(self._requests.values()):
            if request.router is router:
                self.cancel(request.request_id)

    def on_started(self, started: Started) -> None:
        """Record how much of the prompt was cached."""
        request = self._requests.get(started.request_id)
        if request is not None:  # otherwise it was cancelled during the step
            request.cached_tokens = started.cached_tokens

    def on_timed(self, timed: Timed) -> None:
        """Keep a part of the timeline for the next message; unknown ids are ignored."""
        if (request := self._requests.get(timed.request_id)) is not None:
            request.timing.add(timed.entries)

    def on_token(self, token: Token, steps: Steps) -> None:
        """Send a token, the first one with PREFILL_DONE; unknown ids are ignored."""
        request = self._requests.get(token.request_id)
        if request is None:
            return
        is_last = token.finish_reason is not None
        if is_last:
            del self._requests[token.request_id]
        request.num_tokens += token.finish_reason != STOP  # a stop token is not part of the text
        if token.index == 0:
            send_first(request.router, token, request.cached_tokens, 0, request.timing)
            return
        if token.finish_reason != STOP:
            steps.add_token(request.router, token)
        if is_last:
            usage = usage_of(token, request.num_tokens, request.timing)
            steps.add_end(request.router, token.request_id, usage)

    def fail(self, request_id: int, error: WireError) -> None:
        """End a request that the engine cannot serve."""
        self._on_failed(self._requests.pop(request_id), error)
