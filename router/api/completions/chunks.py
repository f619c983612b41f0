"""Responses to text and chat completions: one body, or a chunk for each token.

Everything around a token's text is rendered once per choice, so the usual chunk costs one JSON
string and three appends.  Pure.
"""

from __future__ import annotations

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


class CompletionAnswer:
    """Renders a completion; an `Answer`.

    A subclass renders a choice: whole (`entry`), or its next part (`delta`).
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
        self._is_rich = request.has_logprobs or request.has_ids or request.has_running_usage
        # Tokens that are in events already, where every event counts them.
        self._shown: Counter[Choice] = Counter()
        self._started: set[Choice] = set()
        # What stands around the text in a chunk, nothing where every chunk is rendered anew:
        # of each choice that has gone on after its first chunk, and of the only one if it is plain.
        self._around: dict[Choice, Around] = {}
        self.usual: tuple[bytes, bytes] | None = None

    def entry(self, choice: Choice, piece: Delta) -> dict[str, Any]:
        """Return one entry of `choices` of a whole answer."""
        raise NotImplementedError

    def delta(self, choice: Choice, piece: Delta, *, is_first: bool) -> dict[str, Any]:
        """Return the field of a chunk that has the next part of a choice."""
        raise NotImplementedError

    def about_prompt(self, choice: Choice, piece: Delta) -> dict[str, Any]:
        """Return the fields about the prompt, which appear once beside the choices."""
        return {}

    def whole(self, pieces: Sequence[Delta]) -> bytes:
        choices = self._completion.choices
        body = {
            **self._head,
            "choices": [self.entry(*each) for each in zip(choices, pieces, strict=True)],
            "usage": self._usage(),
            **self._fingerprint,
            "service_tier": None,
            **self.about_prompt(choices[0], pieces[0]),
        }
        return _encode(body)

    def take(self) -> bytes:
        parts: list[bytes] = []
        for choice, pieces in self._completion.take():
            if choice not in self._started and pieces:
                self._started.add(choice)
                parts.append(self._chunk(choice, pieces.pop(0), is_first=True))
            around = self._around_text(choice) if pieces else ()
            for piece in pieces:
                text, _, _, finish_reason, read, _ = piece
                content = text if read is None else piece.content
                if finish_reason is not None or content is None or not around:
                    parts.append(self._chunk(choice, piece))
                else:
                    parts += (around[0], _encode(content), around[1])
        return b"".join(parts)

    def end(self) -> bytes:
        if not self._request.has_usage:
            return DONE
        return self._document([], usage=self._usage(), **self._fingerprint) + DONE

    def failure(self, error: HttpError) -> bytes:
        # The error, at which clients raise, and the usual end.
        return event(error.body) + DONE

    def _chunk(self, choice: Choice, piece: Delta, *, is_first: bool = False) -> bytes:
        request, rest = self._request, dict[str, Any]()
        if request.has_usage:
            rest["usage"] = (
                self._running_usage(choice, piece) if request.has_running_usage else None
            )
        if is_first:
            rest |= self.about_prompt(choice, piece)
        if piece.finish_reason is not None:
            rest |= self._fingerprint
        return self._document([self._entry(choice, piece, is_first=is_first)], **rest)

    def _usage(self) -> UsageBody:
        request, choices = self._request, self._completion.choices
        return usage_body(choices, request.num_choices, has_baton=request.has_baton_usage)

    def _running_usage(self, choice: Choice, piece: Delta) -> UsageBody:
        # A piece is a token: more may have been taken that come in the next events.
        is_last = piece.finish_reason is not None
        self._shown[choice] = choice.num_tokens if is_last else self._shown[choice] + 1
        return running_usage(choice, self._shown[choice])

    def _document(self, choices: Sequence[dict[str, Any]], **rest: Any) -> bytes:
        return event(_encode({**self._head, "choices": choices, **rest}))

    def _entry(self, choice: Choice, piece: Delta, *, is_first: bool) -> dict[str, Any]:
        request = self._request
        entry = {"index": choice.index, **self.delta(choice, piece, is_first=is_first)}
        entry["logprobs"] = (
            self.logprobs(request.names, piece.scores) if request.has_logprobs else None
        )
        if piece.finish_reason is not None or request.has_ids:
            return entry | ending(choice, piece)
        return entry | {"finish_reason": None}

    def _around_text(self, choice: Choice) -> Around:
        if choice not in self._around:
            around = self._around[choice] = () if self._is_rich else self._render_around(choice)
            if around and choice.is_plain and len(self._completion.choices) == 1:
                self.usual = around
        return self._around[choice]

    def _render_around(self, choice: Choice) -> tuple[bytes, bytes]:
        # A chunk is rendered whose text is one NUL, which no other field has, and cut there.
        mark = b'"\\u0000"'
        before, after = self._chunk(choice, Delta("\0")).rsplit(mark, 1)
        return before, after


def ending(choice: Choice, piece: Delta) -> dict[str, Any]:
    """Return why a choice ended, and its token ids if they are requested."""
    why = {"finish_reason": piece.finish_reason, "stop_reason": choice.stop_reason}
    return why | {"token_ids": list(piece.token_ids)} if choice.request.has_ids else why


def prompt_ids(choice: Choice) -> dict[str, Any]:
    """Return the token ids of the prompt of a choice, if they are requested."""
    return {"prompt_token_ids": list(choice.prompt)} if choice.request.has_ids else {}
