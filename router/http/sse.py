"""Server-sent events: the chunks of a streamed completion as bytes.

Everything around a token's text is rendered once per choice, so the usual event costs one JSON
string and three appends.  Events never carry ``id:`` (after one, a client may take a later comment
for an empty event).  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from router.http.asgi import Header, HttpError
from router.http.choice import Choice, Piece
from router.http.completion import Completion
from router.http.responses import UsageBody, chat_logprobs, completion_logprobs

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
    """The end of a stream that broke: clients raise on the first and stop at the second."""
    return event(error.body) + DONE


class ChunkWriter:
    """Renders the pieces of one exchange; `is_chat` chooses between the two APIs."""

    def __init__(
        self,
        completion: Completion,
        *,
        completion_id: str,
        created: int,
        model: str,
        is_chat: bool,
        has_usage: bool = False,
        has_running_usage: bool = False,
    ) -> None:
        self._completion = completion
        self._is_chat = is_chat
        self._has_usage = has_usage
        self._has_running_usage = has_usage and has_running_usage
        self._head = {
            "id": completion_id,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._around: dict[Choice, tuple[bytes, bytes]] = {}

    def take(self) -> bytes:
        """Return the events of everything that moved since the last call; often just one."""
        parts: list[bytes] = []
        for choice, pieces in self._completion.take():
            around = self._around.get(choice)
            if around is None and pieces:
                parts.append(self._chunk(choice, pieces.pop(0), is_first=True))
                around = self._around[choice] = self._render_around(choice)
            is_rich = self._is_rich(choice)
            for piece in pieces:
                if around is None or is_rich or piece.finish_reason is not None:
                    parts.append(self._chunk(choice, piece))
                else:
                    parts += (around[0], _encode(piece.text), around[1])
        return b"".join(parts)

    def end(self) -> bytes:
        """Return what follows the last chunk."""
        if not self._has_usage:
            return DONE
        return self._document([], self._completion.usage) + DONE

    def _is_rich(self, choice: Choice) -> bool:
        output = choice.output
        return output.has_logprobs or output.has_ids or self._has_running_usage

    def _chunk(self, choice: Choice, piece: Piece, *, is_first: bool = False) -> bytes:
        entry = self._entry(choice, piece, is_first=is_first)
        usage = self._completion.usage if self._has_running_usage else None
        return self._document([entry], usage)

    def _document(self, choices: Sequence[dict[str, Any]], usage: UsageBody | None) -> bytes:
        document: dict[str, Any] = {**self._head, "choices": choices}
        if self._has_usage:
            document["usage"] = usage
        return event(_encode(document))

    def _entry(self, choice: Choice, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        tokenizer, has_logprobs = choice.output.tokenizer, choice.output.has_logprobs
        entry: dict[str, Any] = {"index": choice.index}
        if self._is_chat:
            entry["delta"] = _delta(piece, is_first=is_first)
            entry["logprobs"] = chat_logprobs(tokenizer, piece.scores) if has_logprobs else None
        else:
            entry["text"] = choice.prefix + piece.text if is_first else piece.text
            scores = completion_logprobs(tokenizer, piece.scores) if has_logprobs else None
            entry["logprobs"] = scores
        entry["finish_reason"] = piece.finish_reason
        if choice.output.has_ids:
            entry["token_ids"] = list(piece.token_ids)
            if is_first:
                entry["prompt_token_ids"] = list(choice.prompt)
        return entry

    def _render_around(self, choice: Choice) -> tuple[bytes, bytes]:
        # Cut at a text that JSON does not change and that stands in no other field.
        mark = b'"\\u0000"'
        before, after = self._chunk(choice, Piece("\0")).rsplit(mark, 1)
        return before, after


def _delta(piece: Piece, *, is_first: bool) -> dict[str, str]:
    if is_first:
        return {"role": "assistant", "content": piece.text}
    return {"content": piece.text} if piece.text or piece.finish_reason is None else {}
