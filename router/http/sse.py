"""Server-sent events: the chunks of a streamed completion as bytes.

Everything around a token's text is rendered once per choice, so the usual event costs one JSON
string and three appends.  Events never carry ``id:`` (after one, a client may take a later comment
for an empty event).  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from router.http.asgi import Header, HttpError
from router.http.completion import Choice, Completion, Piece
from router.http.responses import UsageBody, chat_logprobs, completion_logprobs, usage_body

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
HEADERS: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_encode: Final = msgspec.json.Encoder().encode


def event(body: bytes) -> bytes:
    """Frame one JSON document."""
    return b"data: " + body + b"\n\n"


def failure(error: HttpError) -> bytes:
    """The end of a stream that broke: the error, at which clients raise, and the usual end."""
    return event(error.body) + DONE


class ChunkWriter:
    """Renders the pieces of one completion; `head` holds id, created and model of every chunk."""

    def __init__(self, completion: Completion, head: Mapping[str, object]) -> None:
        self._completion = completion
        self._asked = asked = completion.asked
        kind = "chat.completion.chunk" if asked.is_chat else "text_completion"
        self._head = {"id": head["id"], "object": kind, **head}  # in the order of the API
        self._is_rich = asked.has_logprobs or asked.has_ids or asked.has_running_usage
        self._around: dict[Choice, tuple[bytes, bytes]] = {}

    def take(self) -> bytes:
        """Return the events of everything that moved since the last call; often just one."""
        parts: list[bytes] = []
        for choice, pieces in self._completion.take():
            around = self._around.get(choice)
            if around is None and pieces:
                parts.append(self._chunk(choice, pieces.pop(0), is_first=True))
                around = self._around[choice] = self._render_around(choice)
            for piece in pieces:
                if around is None or self._is_rich or piece.finish_reason is not None:
                    parts.append(self._chunk(choice, piece))
                else:
                    parts += (around[0], _encode(piece.text), around[1])
        return b"".join(parts)

    def end(self) -> bytes:
        """Return what follows the last chunk."""
        if not self._asked.has_usage:
            return DONE
        return self._document([], self._usage()) + DONE

    def _chunk(self, choice: Choice, piece: Piece, *, is_first: bool = False) -> bytes:
        entry = self._entry(choice, piece, is_first=is_first)
        usage = self._usage() if self._asked.has_running_usage else None
        return self._document([entry], usage)

    def _usage(self) -> UsageBody:
        return usage_body(self._completion.choices, self._asked.num_choices)

    def _document(self, choices: Sequence[dict[str, Any]], usage: UsageBody | None) -> bytes:
        document: dict[str, Any] = {**self._head, "choices": choices}
        if self._asked.has_usage:
            document["usage"] = usage
        return event(_encode(document))

    def _entry(self, choice: Choice, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        asked = self._asked
        entry: dict[str, Any] = {"index": choice.index}
        if asked.is_chat:
            entry["delta"] = _delta(piece, is_first=is_first)
            render = chat_logprobs
        else:
            entry["text"] = choice.prefix + piece.text if is_first else piece.text
            render = completion_logprobs
        entry["logprobs"] = render(asked.tokenizer, piece.scores) if asked.has_logprobs else None
        entry["finish_reason"] = piece.finish_reason
        if asked.has_ids:
            entry["token_ids"] = list(piece.token_ids)
            if is_first:
                entry["prompt_token_ids"] = list(choice.prompt)
        return entry

    def _render_around(self, choice: Choice) -> tuple[bytes, bytes]:
        # A chunk is rendered whose text is one NUL, which no other field has, and cut there.
        mark = b'"\\u0000"'
        before, after = self._chunk(choice, Piece("\0")).rsplit(mark, 1)
        return before, after


def _delta(piece: Piece, *, is_first: bool) -> dict[str, str]:
    if is_first:
        return {"role": "assistant", "content": piece.text}
    return {"content": piece.text} if piece.text or piece.finish_reason is None else {}
