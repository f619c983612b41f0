"""Renders responses of /v1/messages as one message or as a stream of events.

A message is a list of blocks, each of one kind; a part of another kind begins a new block.  Blocks
have no status: if a tool call is unfinished, the `stop_reason` is not `tool_use`.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final

import msgspec
from pydantic_core import from_json

from router.api.completions.completion import Completion
from router.api.completions.deltas import Delta
from router.api.completions.response import Head, event
from router.api.completions.usage import usage_body
from router.api.errors import HttpError
from router.api.messages.errors import message_error
from router.text.output_parts import (
    TEXTLESS,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reasoning,
    joined,
)

REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# The kind of block for each class of part.
KINDS: Final[dict[type[Part], str]] = {
    Content: "text",
    Reasoning: "thinking",
    CallStart: "tool_use",
    CallArguments: "tool_use",
}
# For each kind of block, the kind of its deltas and the name of their text field.
DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}

_encode: Final = msgspec.json.Encoder().encode


class MessageAnswer:
    """Renders one message; implements `router.api.completions.response.Answer`.

    `max_tokens` is the client's limit.  `eager` names the tools whose arguments are streamed as
    they are generated.
    """

    usual: tuple[bytes, bytes] | None = None
    ping = event(b'{"type":"ping"}', "ping")

    def __init__(
        self, completion: Completion, head: Head, *, max_tokens: int, eager: Container[str] = ()
    ) -> None:
        self._completion = completion
        self._head = head
        self._max_tokens = max_tokens
        self._eager = eager
        self._blocks: BlockEvents | None = None

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        (delta,) = deltas
        content = blocks_of(_parts(delta))
        return _encode(self._message(content) | self._ending(delta) | {"usage": self._usage()})

    def take(self) -> bytes:
        events: list[bytes] = []
        for _, deltas in self._completion.take():
            if self._blocks is None and deltas:
                events.append(self._start())
                self._blocks = BlockEvents(self._eager)
            for delta in deltas:
                assert self._blocks is not None
                events += [self._blocks.add(part) for part in _parts(delta)]
                if delta.finish_reason is not None:
                    ending = {"delta": self._ending(delta), "usage": self._usage()}
                    events += [self._blocks.close(), _event("message_delta", ending)]
        return b"".join(events)

    def end(self) -> bytes:
        return _event("message_stop", {})

    def failure(self, error: HttpError) -> bytes:
        return event(message_error(error, self._head.request_id), "error")

    def _start(self) -> bytes:
        unknown = {"stop_reason": None, "stop_sequence": None}
        usage = self._usage() | {"output_tokens": 0}
        return _event("message_start", {"message": self._message([]) | unknown | {"usage": usage}})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
        }

    def _ending(self, delta: Delta) -> dict[str, str | None]:
        (choice,) = self._completion.choices
        if delta.finish_reason == "stop" and isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        reason = REASONS[delta.finish_reason or "stop"]
        if reason == "max_tokens" and choice.num_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage = usage_body(self._completion.choices, 1)
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


class BlockEvents:
    """Converts parts to the events of blocks.

    The arguments of a call are sent at its end, because Anthropic's client fails on text that does
    not parse; of an unfinished call, only the complete values are sent.  The arguments of `eager`
    tools are streamed as they are generated.
    """

    def __init__(self, eager: Container[str] = ()) -> None:
        self._eager = eager
        self._is_eager = False
        # Buffered arguments of the open call.
        self._arguments: list[str] = []
        self._index = -1
        self._kind = ""  # of the open block
        # The bytes before and after the text in its next delta event.
        self._around = (b"", b"")

    def add(self, part: Part) -> bytes:
        """Return the events of the next part."""
        if isinstance(part, CallEnd):
            arguments, self._arguments = "".join(self._arguments), []
            return self._text_delta(arguments) + self.close()
        text = "" if isinstance(part, CallStart) else part.text
        opened = b""
        if isinstance(part, CallStart) or (text and KINDS[type(part)] != self._kind):
            opened = self.close() + self._open(empty_block(part))
        if isinstance(part, CallStart):
            self._is_eager = part.name in self._eager
        elif isinstance(part, CallArguments) and not self._is_eager:
            self._arguments.append(text)
            return opened
        return opened + self._text_delta(text)

    def close(self) -> bytes:
        """Return the end event of the open block, if any."""
        if not self._kind:
            return b""
        last = b""
        if self._kind == "thinking":
            last = self._delta("signature_delta", "signature", "")
        elif self._arguments:
            arguments, self._arguments = "".join(self._arguments), []
            last = self._text_delta(_encode(read_arguments(arguments)).decode())
        self._kind = ""
        return last + _event("content_block_stop", {"index": self._index})

    def _text_delta(self, text: str) -> bytes:
        before, after = self._around
        return before + _encode(text) + after if text else b""

    def _open(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._kind = block["type"]
        # Render an event whose text is a NUL, and split it there.
        before, after = self._delta(*DELTAS[self._kind], "\0").split(b'"\\u0000"')
        self._around = before, after
        return _event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        delta = {"type": kind, name: text}
        return _event("content_block_delta", {"index": self._index, "delta": delta})


def blocks_of(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return the blocks of a complete answer."""
    blocks: list[dict[str, Any]] = []
    for part in joined([part for part in parts if isinstance(part, TEXTLESS) or part.text]):
        match part:
            case CallArguments(text=text):
                blocks[-1]["input"] = read_arguments(text)
            case Content(text) | Reasoning(text):
                blocks.append(empty_block(part) | {KINDS[type(part)]: text})
            case CallStart():
                blocks.append(empty_block(part))
    return blocks


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the JSON arguments of a call; if they are truncated, keep the complete values.

    A number at the very end is kept, since missing digits cannot be detected.  Anthropic's client
    uses the same parser for a truncated stream.  Text that is not an object becomes {}.
    """
    try:
        arguments = from_json(text, allow_inf_nan=False, allow_partial=True)
    except (ValueError, TypeError):  # TypeError: an unpaired surrogate
        return {}
    return arguments if isinstance(arguments, dict) else {}


def empty_block(part: Part) -> dict[str, Any]:
    """Return the content block (text, thinking, tool_use) that `part` opens, before its text."""
    kind = KINDS[type(part)]
    if isinstance(part, CallStart):
        return {
            "type": kind,
            "id": f"toolu_{secrets.token_hex(12)}",
            "name": part.name,
            "input": {},
        }
    # Anthropic signs reasoning; this server does not: the signature is empty.
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _parts(delta: Delta) -> Sequence[Part]:
    return (Content(delta.text),) if delta.parts is None else delta.parts


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return event(_encode({"type": kind} | fields), kind)
