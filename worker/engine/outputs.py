"""The outputs of a step; types only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from wire.errors import ErrorCode, WireError
from wire.payloads import Logprobs

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Started:
    """The first blocks are allocated; the first `cached_tokens` tokens have their KV already."""

    request_id: int
    block_table: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Computed:
    """KV of the first `num_tokens` tokens exists, cached ones included."""

    request_id: int
    num_tokens: int


class Token(msgspec.Struct, frozen=True, gc=False):  # the cheapest type: a step makes hundreds
    """A sampled token; `index` counts from 0 the tokens sampled on this worker.

    With `finish_reason` "stop" it is an EOS or stop token and not part of the text; with "length"
    it is the last token of the text.  The first token carries the requested `prompt_logprobs`,
    packed as in `wire.logprobs`.
    """

    request_id: int
    token_id: int
    index: int
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: bytes | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks are allocated for all tokens; the first `cached_tokens` have their KV already."""

    request_id: int
    block_table: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Displaced:
    """A reservation must end, unless a router claims it first: a claimed one needs its blocks."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence ended with an error; its blocks are free."""

    request_id: int
    code: ErrorCode
    message: str

    def for_peers(self) -> WireError:
        """Return the error for the network, without a model's message, which may quote prompts."""
        message = self.message
        if self.code is ErrorCode.MODEL_FAILED:
            message = "the model failed on this request; the worker's log has why"
        return WireError(self.code, message)


Output = Started | Computed | Token | Reserved | Displaced | Failed
