"""The outputs of a step; types only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from wire.errors import ErrorCode, WireError
from wire.payloads import Logprobs
from wire.timeline import Entry

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence got its first blocks; the KV of its first `cached_tokens` tokens was cached."""

    request_id: int
    block_table: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The KV of a sequence's first `num_tokens` tokens exists, cached tokens included."""

    request_id: int
    num_tokens: int


class Token(msgspec.Struct, frozen=True, gc=False):  # a step makes hundreds
    """A sampled token; `index` is its position among the tokens sampled on this worker.

    If `finish_reason` is "stop", it is an EOS or stop token and not part of the text; if "length",
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
class Timed:
    """The timeline of a sequence up to its first or its last token, which follows."""

    request_id: int
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation got its blocks; the KV of its first `cached_tokens` tokens was cached."""

    request_id: int
    block_table: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Displaced:
    """An unclaimed reservation must end, because a claimed one needs its blocks."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence ended with an error; its blocks are free."""

    request_id: int
    code: ErrorCode
    message: str

    def for_peers(self) -> WireError:
        """Return the error to send to peers, without a model's message, which may quote prompts."""
        message = self.message
        if self.code is ErrorCode.MODEL_FAILED:
            message = "the model failed on this request; the worker's log has why"
        return WireError(self.code, message)


Output = Started | Computed | Timed | Token | Reserved | Displaced | Failed
