"""Renders text and chat completions as one body or as a stream of chunks, one for each token.

The JSON around a token's text is rendered once per choice, so a typical chunk costs one JSON string
and three appends.  No I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from router.api.completions.completion import Choice, Completion
from router.api.completions.deltas import Delta
from router.api.completions.logprobs import Render
from router.api.completions.response import DONE, PING, Head, event
from router.api.completions.usage import UsageBody, running_usage, usage_body
from router.api.errors import HttpError

_encode: Final = msgspec.json.Encoder().encode
Around = tuple[bytes, bytes] | tuple[()]


class CompletionAnswer(ABC):
    """Renders a completion; implements `Answer`.

    A subclass renders a complete choice (`entry`) and the next part of a choice (`delta`).
    """

    id_prefix: str
    kind: str
    chunk_kind: str
    logprobs: Render
    ping = PING

    def __init__(self, completion: Completion, head: Head) -> None:
        self._completion = completion
        self._request = request = completion.request
        self._head = {
            "id": f"{self.id_prefix}-{request.request_id or head.request_id}",
            "object": self.chunk_kind if request.is_streamed else self.kind,
            "created": head.created,
            "model": head.model,
        }
        self._fingerprint = {"system_fingerprint": request.fingerprint}
        # Whether chunks differ in more than their text, so that each is rendered as a whole.
        self._is_rich = request.has_logprobs or request.has_ids or request.has_running_usage
        # How many tokens of a choice have been sent, if every chunk has the usage so far.
        self._shown: Counter[Choice] = Counter()
        # Choices whose first chunk was rendered, which has the role and fields about the prompt.
        self._started: set[Choice] = set()
        # For each choice past its first chunk, the JSON of a chunk before and after its text; () if
        # chunks are rich.  `usual` is that of a single plain choice, see `Answer.usual`.
        self._around: dict[Choice, Around] = {}
        self.usual: tuple[bytes, bytes] | None = None

    @abstractmethod
    def entry(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """Return an entry of `choices` of a response that is not streamed."""

    @abstractmethod
    def delta(self, choice: Choice, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        """Return the fields of a chunk that contain the next part of a choice."""

    def about_prompt(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """Return the top-level fields about the prompt; a stream sends them once per choice."""
        return {}

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        choices = self._completion.choices
        body = {
            **self._head,
            "choices": [self.entry(*each) for each in zip(choices, deltas, strict=True)],
            "usage": self._usage(),
            **self._fingerprint,
            "service_tier": None,
            **self.about_prompt(choices[0], deltas[0]),
        }
        return _encode(body)

    def take(self) -> bytes:
        chunks: list[bytes] = []
        for choice, deltas in self._completion.take():
            if choice not in self._started and deltas:
                self._started.add(choice)
                chunks.append(self._chunk(choice, deltas.pop(0), is_first=True))
            around = self._around_text(choice) if deltas else ()
            for delta in deltas:
                text, _, _, finish_reason, parts, _ = delta
                content = text if parts is None else delta.content
                if finish_reason is not None or content is None or not around:
                    chunks.append(self._chunk(choice, delta))
                else:
                    chunks += (around[0], _encode(content), around[1])
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self._request.has_usage:
            return DONE
        return self._document([], usage=self._usage(), **self._fingerprint) + DONE

    def failure(self, error: HttpError) -> bytes:
        # Clients raise an exception at the error; the usual end follows it.
        return event(error.body) + DONE

    def _chunk(self, choice: Choice, delta: Delta, *, is_first: bool = False) -> bytes:
        request, rest = self._request, dict[str, Any]()
        if request.has_usage:
            rest["usage"] = (
                self._running_usage(choice, delta) if request.has_running_usage else None
            )
        if is_first:
            rest |= self.about_prompt(choice, delta)
        if delta.finish_reason is not None:
            rest |= self._fingerprint
        return self._document([self._entry(choice, delta, is_first=is_first)], **rest)

    def _usage(self) -> UsageBody:
        request, choices = self._request, self._completion.choices
        return usage_body(choices, request.num_choices, has_baton=request.has_baton_usage)

    def _running_usage(self, choice: Choice, delta: Delta) -> UsageBody:
        # Count this delta's token only: tokens of the next events may be taken already.
        is_last = delta.finish_reason is not None
        self._shown[choice] = choice.num_tokens if is_last else self._shown[choice] + 1
        return running_usage(choice, self._shown[choice])

    def _document(self, choices: Sequence[dict[str, Any]], **rest: Any) -> bytes:
        return event(_encode({**self._head, "choices": choices, **rest}))

    def _entry(self, choice: Choice, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        request = self._request
        entry = {"index": choice.index, **self.delta(choice, delta, is_first=is_first)}
        entry["logprobs"] = (
            self.logprobs(request.names, delta.scores) if request.has_logprobs else None
        )
        if delta.finish_reason is not None or request.has_ids:
            return entry | ending(choice, delta)
        return entry | {"finish_reason": None}

    def _around_text(self, choice: Choice) -> Around:
        if choice not in self._around:
            around = self._around[choice] = () if self._is_rich else self._render_around(choice)
            if around and choice.is_plain and len(self._completion.choices) == 1:
                self.usual = around
        return self._around[choice]

    def _render_around(self, choice: Choice) -> tuple[bytes, bytes]:
        # Render a chunk whose text is a NUL, which no other field contains, and split it there.
        before, after = self._chunk(choice, Delta("\0")).rsplit(b'"\\u0000"', 1)
        return before, after


def ending(choice: Choice, delta: Delta) -> dict[str, Any]:
    """Return the finish reason of a choice, and its token ids if they are requested."""
    why = {"finish_reason": delta.finish_reason, "stop_reason": choice.stop_reason}
    return why | {"token_ids": list(delta.token_ids)} if choice.request.has_ids else why


def prompt_ids(choice: Choice) -> dict[str, Any]:
    """Return the token ids of the prompt if they are requested."""
    return {"prompt_token_ids": list(choice.prompt)} if choice.request.has_ids else {}
