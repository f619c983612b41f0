"""Local requests: a decode worker prefills the prompt itself, and no KV is transferred.

PREFILL_REQUEST has this worker's own rank.  The engine prefills the prompt and continues to
generate; PREFILL_DONE carries the first token, and no DECODE_REQUEST follows.  SPEC 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from wire.errors import ErrorCode, WireError
from wire.frames import PrefillDone, PrefillRequest
from wire.parts import Message
from wire.payloads import STOP, PrefillResult, Usage, decode_prompt, encode_prefill_result
from worker.engine.engine import Engine
from worker.engine.outputs import Failed, Output, Started, Token
from worker.engine.sequence import Sequence
from worker.link import RouterLink
from worker.roles.step import Steps

Post = Callable[[Callable[[Engine], None]], object]


@dataclass(slots=True, eq=False)
class LocalRequest:
    """One local request, from PREFILL_REQUEST to its last token."""

    router: RouterLink
    request_id: int
    cached_tokens: int = 0
    num_tokens: int = 0


class LocalRequests:
    """All local requests of this worker.  Runs on the event loop."""

    def __init__(self, post: Post, on_failed: Callable[[LocalRequest, WireError], None]) -> None:
        self._post = post
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
        if options.max_tokens is None:
            text = "PREFILL_REQUEST with the rank of its own receiver needs max_tokens"
            raise WireError(ErrorCode.PROTOCOL, text)
        self._requests[frame.request_id] = LocalRequest(router, frame.request_id)
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

    def on_output(self, output: Output, steps: Steps) -> None:
        """Process an engine output for one of these requests."""
        request = self._requests[output.request_id]
        match output:
            case Started():
                request.cached_tokens = output.cached_tokens
            case Token() if output.index == 0:
                self._on_first_token(request, output)
            case Token():
                self._on_token(request, output, steps)
            case Failed():
                del self._requests[request.request_id]
                self._on_failed(request, output.for_peers())

    def _on_first_token(self, request: LocalRequest, token: Token) -> None:
        reason = token.finish_reason
        result = PrefillResult(
            token_id=token.token_id,
            cached_tokens=request.cached_tokens,
            finish_reason=reason,
            logprobs=token.logprobs,
            prompt_logprobs=token.prompt_logprobs,
            stop_token_id=token.token_id if reason == STOP else None,
        )
        request.router.send(PrefillDone(request.request_id, 0), encode_prefill_result(result))
        request.num_tokens = 1
        if reason is not None:
            del self._requests[request.request_id]

    def _on_token(self, request: LocalRequest, token: Token, steps: Steps) -> None:
        is_stopped = token.finish_reason == STOP
        if not is_stopped:
            request.num_tokens += 1
            steps.add_token(request.router, token)
        if token.finish_reason is None:
            return
        del self._requests[request.request_id]
        usage = Usage(
            finish_reason=token.finish_reason,
            completion_tokens=request.num_tokens,
            stop_token_id=token.token_id if is_stopped else None,
            stop_logprobs=token.logprobs if is_stopped else None,
        )
        steps.add_end(request.router, request.request_id, usage)
