"""What the engine says about sequences: the outputs of a step; types only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from wire.errors import ErrorCode, WireError
from wire.payloads import Logprobs

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Started:
    """The first blocks are allocated; the KV of `cached_tokens` leading tokens is there already."""

    request_id: int
    block_table: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Computed:
    """KV of the first `num_tokens` tokens exists, those found in the prefix cache included."""

    request_id: int
    num_tokens: int


class Token(msgspec.Struct, frozen=True, gc=False):  # the cheapest type: a step makes hundreds
    """A sampled token; `index` counts from 0 the tokens sampled on this worker.

    With `finish_reason` "stop" it is an EOS or stop token: it ends the sequence and is not part of
    the text.  With "length" it is the last token of the text.  `prompt_logprobs` comes
    with the first token, if asked for, packed as in `wire.logprobs`.
    """

    request_id: int
    token_id: int
    index: int
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: bytes | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks are there for all tokens; `cached_tokens` leading ones have their KV already."""

    request_id: int
    block_table: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Displaced:
    """A reservation has to end, unless it is claimed meanwhile: a claimed one needs its blocks."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence ended without success and holds nothing any more."""

    request_id: int
    code: ErrorCode
    message: str

    def for_peers(self) -> WireError:
        """Return the error for the network; without a model's message, which may quote prompts."""
        if self.code is ErrorCode.MODEL_FAILED:
            return WireError(
                self.code, "the model failed on this request; the worker's log has why"
            )
        return WireError(self.code, self.message)


Output = Started | Computed | Token | Reserved | Displaced | Failed
