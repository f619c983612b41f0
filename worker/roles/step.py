"""Sends the tokens of one engine step to routers, in as few messages as possible."""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.frames import DecodeDone, DecodeToken, Frame
from wire.parts import MAX_HEADERS
from wire.payloads import Logprobs, Usage, encode_map
from worker.engine.outputs import Token
from worker.link import RouterLink


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
        self._steps: dict[RouterLink, Step] = {}

    def add_token(self, router: RouterLink, token: Token) -> None:
        step = self._of(router)
        step.tokens.append(DecodeToken(token.request_id, token.token_id))
        step.logprobs.append(token.logprobs)

    def add_end(self, router: RouterLink, request_id: int, usage: Usage) -> None:
        self._of(router).ends.append((request_id, usage))

    def send(self) -> None:
        """Send each router its tokens, then DECODE_DONE of its finished requests."""
        for router, step in self._steps.items():
            step.send(router)

    def _of(self, router: RouterLink) -> Step:
        step = self._steps.get(router)
        if step is None:
            step = self._steps[router] = Step()
        return step
