"""Converts Anthropic's content blocks to chat messages.

    text          the content of a message; several blocks are joined by line breaks
    thinking      `reasoning_content` of an assistant message; its signature is not verified
    tool_use      one of the `tool_calls` of an assistant message
    tool_result   a separate message with the role tool

Consecutive messages of one role become one message, because some templates require alternating
roles.  Blocks that chat templates do not support are refused with an error that names the block:
images, documents, search results, and content that Anthropic encrypted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from router.api.errors import invalid
from router.api.requests.body import misfit
from wire.errors import shown

Nothing = Annotated[list[Any], Meta(max_length=0)] | None


class Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    """An object of the body whose unknown fields are refused.

    `cache_control` has no effect: every prompt enters the prefix cache.
    """

    cache_control: dict[str, Any] | None = None


class Text(Strict, tag="text"):
    """A text block; `citations` are refused, since the model would not see them."""

    text: str
    citations: Nothing = None


class Thinking(Strict, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUse(Strict, tag="tool_use"):
    """A tool call; `caller` is ignored."""

    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResult(Strict, tag="tool_result"):
    tool_use_id: str
    content: str | list[Any] = ""
    is_error: bool | None = None
    toolset_name: None = None


class Message(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Any], Meta(min_length=1)]


Kinds = Mapping[str | None, type[Any]]
TEXT: Final[Kinds] = {"text": Text}
KINDS: Final[Mapping[str, Kinds]] = {
    "system": TEXT,
    "user": {**TEXT, "tool_result": ToolResult},
    "assistant": {**TEXT, "tool_use": ToolUse, "thinking": Thinking},
}


def read_typed(kinds: Kinds, sent: object, place: str) -> Any:
    """Convert an object of the body to the class for its `type`; `place` is its path."""
    if not isinstance(sent, dict):
        raise invalid(place, "expected an object")
    name = sent.get("type")
    kind = kinds.get(name) if name is None or isinstance(name, str) else None
    if kind is None:
        allowed = ", ".join(filter(None, kinds))
        raise invalid(f"{place}.type", f"{shown(str(name))} is not supported here, only {allowed}")
    try:
        return msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        raise misfit(error, kind, place) from error


def text_of(content: str | Sequence[object], place: str) -> str:
    """Return the text of a content that may have only text blocks."""
    if isinstance(content, str):
        return content
    blocks = [read_typed(TEXT, sent, f"{place}[{n}]") for n, sent in enumerate(content)]
    return "\n".join([block.text for block in blocks])


_TEXTS: Final = ("content", "reasoning_content")


class Chat:
    """Converts the messages of a body, one after another, to messages for a chat template."""

    def __init__(self) -> None:
        # The messages so far; each text in them is a list of lines until `messages` joins it.
        self._turns: list[dict[str, Any]] = []
        # The tool calls so far, by the id that the client uses.
        self._calls: dict[str, dict[str, Any]] = {}

    def add(self, message: Message, place: str) -> None:
        """Add a message of the body; `place` is its path, such as messages[0]."""
        if isinstance(message.content, str):
            self.add_text(message.role, message.content)
            return
        for index, sent_block in enumerate(message.content):
            where = f"{place}.content[{index}]"
            match read_typed(KINDS[message.role], sent_block, where):
                case Text(text=text):
                    self.add_text(message.role, text)
                case Thinking(thinking=text):
                    self._turn("assistant").setdefault("reasoning_content", []).append(text)
                case ToolUse() as call:
                    self._call(call)
                case ToolResult() as result:
                    self._answer(result, where)

    def add_text(self, role: str, text: str) -> None:
        """Append text to the last message, or to a new one if the roles differ."""
        self._turn(role)["content"].append(text)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [
            turn | {name: "\n".join(turn[name]) for name in _TEXTS if name in turn}
            for turn in self._turns
        ]

    def _call(self, call: ToolUse) -> None:
        # Some templates accept only ids of nine letters and digits.
        call_id = f"call{len(self._calls):05d}"
        # Templates encode the arguments themselves, so they get an object.
        function = {"name": call.name, "arguments": call.input}
        self._calls[call.id] = {"id": call_id, "type": "function", "function": function}
        self._turn("assistant").setdefault("tool_calls", []).append(self._calls[call.id])

    def _answer(self, result: ToolResult, where: str) -> None:
        call = self._calls.get(result.tool_use_id)
        if call is None:
            unknown = f"{shown(result.tool_use_id)} is the id of no tool_use block before it"
            raise invalid(f"{where}.tool_use_id", unknown)
        text = text_of(result.content, f"{where}.content")
        if result.is_error:  # templates have no field for errors
            text = f"Error: {text}"
        name = call["function"]["name"]
        self._turns.append(
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": [text]}
        )

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role, "content": []})
        return self._turns[-1]
