"""Messages from roles to routers: first tokens, tokens of each step, usage and timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from wire.frames import DecodeDone, DecodeToken, Frame, PrefillDone
from wire.parts import MAX_HEADERS
from wire.payloads import STOP, Logprobs, PrefillResult, Usage, encode_map, encode_prefill_result
from wire.timeline import Entry, Kind, pack_timeline
from worker.engine.outputs import Token
from worker.link import RouterLink


class Timing:
    """Collects the timeline of a request that begins now, for PREFILL_DONE and DECODE_DONE."""

    __slots__ = ("_clock", "_entries", "requested_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.requested_s = clock()
        self._entries: list[Entry] = []

    def add(self, entries: Iterable[Entry]) -> None:
        self._entries += entries

    def take(self) -> bytes | None:
        """Return the entries since the last call, packed; None without any."""
        entries, self._entries = self._entries, []
        if not entries:
            return None
        duration_s = self._clock() - self.requested_s
        return pack_timeline([Entry(Kind.REQUEST, self.requested_s, duration_s), *entries])


def send_first(
    router: RouterLink, token: Token, cached_tokens: int, kv_bytes: int, timing: Timing
) -> None:
    """Send PREFILL_DONE: `kv_bytes` are to be transferred to the decode worker."""
    is_stopped = token.finish_reason == STOP
    result = PrefillResult(
        token_id=token.token_id,
        cached_tokens=cached_tokens,
        finish_reason=token.finish_reason,
        logprobs=token.logprobs,
        prompt_logprobs=token.prompt_logprobs,
        stop_token_id=token.token_id if is_stopped else None,
        timeline=timing.take(),
    )
    router.send(PrefillDone(token.request_id, kv_bytes), encode_prefill_result(result))


def usage_of(token: Token, num_tokens: int, timing: Timing) -> Usage:
    """Return the usage of a request that ends with this token, without any KV transfer."""
    assert token.finish_reason is not None
    is_stopped = token.finish_reason == STOP
    return Usage(
        finish_reason=token.finish_reason,
        completion_tokens=num_tokens,
        stop_token_id=token.token_id if is_stopped else None,
        stop_logprobs=token.logprobs if is_stopped else None,
        timeline=timing.take(),
    )


@dataclass(slots=True)
class Step:
    """The tokens and finished requests of one engine step, for one router."""

    tokens: list[Frame] = field(default_factory=list)
    logprobs: list[Logprobs | None] = field(default_factory=list)
    ends: list[tuple[int, Usage]] = field(default_factory=list)

    def send(self, router: RouterLink) -> None:
        """Send the tokens in as few messages as possible, then DECODE_DONE of finished requests."""
        for start in range(0, len(self.tokens), MAX_HEADERS):
            logprobs = self.logprobs[start : start + MAX_HEADERS]
            wanted = any(entry is not None for entry in logprobs)
            payload = (encode_map(logprobs),) if wanted else ()
            router.send(self.tokens[start : start + MAX_HEADERS], *payload)
        for request_id, usage in self.ends:
            router.send(DecodeDone(request_id), encode_map(usage))


class Steps:
    """The tokens and finished requests of one engine step, for all routers."""

    def __init__(self) -> None:
        self._steps = defaultdict[RouterLink, Step](Step)

    def add_token(self, router: RouterLink, token: Token) -> None:
        step = self._steps[router]
        step.tokens.append(DecodeToken(token.request_id, token.token_id))
        step.logprobs.append(token.logprobs)

    def add_end(self, router: RouterLink, request_id: int, usage: Usage) -> None:
        self._steps[router].ends.append((request_id, usage))

    def send(self) -> None:
        """Send each router its tokens, then DECODE_DONE of its finished requests."""
        for router, step in self._steps.items():
            step.send(router)
