"""Renders responses of POST /v1/responses as one object or as a stream of events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from router.api.completions.completion import Choice, Completion
from router.api.completions.deltas import Delta
from router.api.completions.logprobs import chat_logprobs, encoded
from router.api.completions.response import PING, Head
from router.api.completions.usage import usage_body
from router.api.errors import HttpError
from router.api.responses.output import Output, content_of


class FixedFields(NamedTuple):
    """The fixed fields of a response, known before generation starts.

    `key` is the common part of its id and the ids of its items.  `echo` has the fields that repeat
    the request.  `keep` is called with the encoded response when it is complete.
    """

    key: str
    echo: Mapping[str, Any]
    keep: Callable[[bytes], None]


class ResponseAnswer:
    """Renders the one choice; implements `router.api.completions.response.Answer`."""

    ping = PING
    usual: tuple[bytes, bytes] | None = None

    def __init__(self, completion: Completion, head: Head, *, fixed: FixedFields) -> None:
        self._completion = completion
        self._fixed = fixed
        options = completion.request.requests[0][0].options
        self._head: Final[dict[str, Any]] = {
            "id": response_id(fixed.key),
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "temperature": options.temperature,
            "top_p": options.top_p,
            **fixed.echo,
        }
        self._output = Output(fixed.key, is_streamed=completion.request.is_streamed)
        self._is_started = False
        self._status = "in_progress"
        self._is_over_limit = False

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        [choice], [delta] = self._completion.choices, deltas
        self._add(choice, delta)
        return self._finish()

    def take(self) -> bytes:
        for choice, deltas in self._completion.take():
            for delta in deltas:
                if not self._is_started:
                    self._begin()
                self._add(choice, delta)
        return self._output.take_events()

    def end(self) -> bytes:
        self._output.add_event(f"response.{self._status}", response=msgspec.Raw(self._finish()))
        return self._output.take_events()

    def failure(self, error: HttpError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        details = {"code": code, "message": error.message}
        self._output.add_event("response.failed", response=self._document("failed", error=details))
        return self._output.take_events()

    def _begin(self) -> None:
        self._is_started = True
        response = msgspec.Raw(msgspec.json.encode(self._document("in_progress")))
        self._output.add_event("response.created", response=response)
        self._output.add_event("response.in_progress", response=response)

    def _add(self, choice: Choice, delta: Delta) -> None:
        logprobs = encoded(chat_logprobs, choice, delta.scores)
        parts = content_of(delta.text) if delta.parts is None else delta.parts
        self._output.add(parts, logprobs["content"] if logprobs else ())
        if delta.finish_reason is not None:
            self._is_over_limit = delta.finish_reason == "length"
            self._output.end("incomplete" if self._is_over_limit else "completed")
            is_whole = not (self._is_over_limit or self._output.is_cut)
            self._status = "completed" if is_whole else "incomplete"

    def _finish(self) -> bytes:
        # The API defines no reason for calls that a stop string truncated or that do not parse.
        details = {"reason": "max_output_tokens"} if self._is_over_limit else None
        document = self._document(self._status, incomplete_details=details, usage=self._usage())
        response = msgspec.json.encode(document)
        self._fixed.keep(response)
        return response

    def _document(self, status: str, **known: Any) -> dict[str, Any]:
        defaults = {"error": None, "incomplete_details": None}
        items = self._output.items("incomplete" if status == "failed" else status)
        return {**self._head, "status": status, **defaults, "output": items, **known}

    def _usage(self) -> dict[str, Any]:
        [choice] = self._completion.choices
        spent = usage_body([choice], 1)
        cached = spent.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": spent.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": spent.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
            "total_tokens": spent.total_tokens,
        }


def response_id(key: str) -> str:
    return f"resp_{key}"
