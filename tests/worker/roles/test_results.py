from __future__ import annotations

from typing import cast

from wire.frames import DecodeToken, Frame
from wire.parts import MAX_HEADERS, decode, encode
from wire.payloads import Logprobs, decode_map
from worker.link import RouterLink
from worker.roles.results import Step


def test_a_step_of_more_tokens_than_a_message_holds_leaves_in_several() -> None:
    sent: list[tuple[int, int]] = []

    class Router:
        def send(self, frames: list[Frame], *payload: bytes) -> None:
            message = decode(encode(frames, *payload))
            sent.append((len(message.tokens), len(decode_map(list[Logprobs], message.body()))))

    step = Step()
    for _ in range(MAX_HEADERS + 1):
        step.tokens.append(DecodeToken(1, 5))
        step.logprobs.append(Logprobs(logprob=-0.5))
    step.send(cast(RouterLink, Router()))
    assert sent == [(MAX_HEADERS, MAX_HEADERS), (1, 1)]
