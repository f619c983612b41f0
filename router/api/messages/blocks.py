"""Content blocks, and the chat messages that they become.

    text          the content of a message; several are lines of it
    thinking      `reasoning_content` of an assistant's message; nobody here checks its signature
    tool_use      one of the `tool_calls` of an assistant's message
    tool_result   a message of its own, whose role is tool

Messages of one role in a row are one turn, as templates that count turns want it.  What templates
have no place for is refused by name: pictures, documents, searches, what Anthropic has encrypted.
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
    """A part of a body in which every field is known.

    `cache_control` has no effect: every prompt is cached, as far as there is room.
    """

    cache_control: dict[str, Any] | None = None


class Text(Strict, tag="text"):
    """`citations` of earlier answers would be lost on the model."""

    text: str
    citations: Nothing = None


class Thinking(Strict, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUse(Strict, tag="tool_use"):
    """`caller` is ours in any case."""

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
    """Return an object of the body at `place` as the type that it says it is."""
    if not isinstance(sent, dict):
        raise invalid(place, "expected an object")
    said = sent.get("type")
    kind = kinds.get(said) if said is None or isinstance(said, str) else None
    if kind is None:
        allowed = ", ".join(filter(None, kinds))
        raise invalid(f"{place}.type", f"{shown(str(said))} is not supported here, only {allowed}")
    try:
        return msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        raise misfit(error, kind, place) from error


def text_of(content: str | Sequence[object], place: str) -> str:
    """Return the text of a content that can be nothing else."""
    if isinstance(content, str):
        return content
    blocks = [read_typed(TEXT, sent, f"{place}[{n}]") for n, sent in enumerate(content)]
    return "\n".join([block.text for block in blocks])


_TEXTS: Final = ("content", "reasoning_content")


class Chat:
    """Converts the messages of a body to those of a chat, one after another."""

    def __init__(self) -> None:
        # Of these, texts are lists of lines until all are there.
        self._turns: list[dict[str, Any]] = []
        # The calls so far, by the ids that the client knows them by.
        self._calls: dict[str, dict[str, Any]] = {}

    def add(self, message: Message, place: str) -> None:
        """Add a message of the body; `place` is where in it that stands."""
        if isinstance(message.content, str):
            self.say(message.role, message.content)
            return
        for index, sent_block in enumerate(message.content):
            where = f"{place}.content[{index}]"
            match read_typed(KINDS[message.role], sent_block, where):
                case Text(text=text):
                    self.say(message.role, text)
                case Thinking(thinking=text):
                    self._turn("assistant").setdefault("reasoning_content", []).append(text)
                case ToolUse() as call:
                    self._call(call)
                case ToolResult() as result:
                    self._answer(result, where)

    def say(self, role: str, text: str) -> None:
        """Add a text, to the last message if that is of the same role."""
        self._turn(role)["content"].append(text)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        return [
            turn | {name: "\n".join(turn[name]) for name in _TEXTS if name in turn}
            for turn in self._turns
        ]

    def _call(self, call: ToolUse) -> None:
        # Some templates take no other ids than nine letters and digits.
        call_id = f"call{len(self._calls):05d}"
        # Templates write the arguments themselves, so they get the object.
        function = {"name": call.name, "arguments": call.input}
        self._calls[call.id] = {"id": call_id, "type": "function", "function": function}
        self._turn("assistant").setdefault("tool_calls", []).append(self._calls[call.id])

    def _answer(self, result: ToolResult, where: str) -> None:
        call = self._calls.get(result.tool_use_id)
        if call is None:
            unknown = f"{shown(result.tool_use_id)} is the id of no tool_use block before it"
            raise invalid(f"{where}.tool_use_id", unknown)
        text = text_of(result.content, f"{where}.content")
        if result.is_error:  # templates have no other place for it
            text = f"Error: {text}"
        name = call["function"]["name"]
        self._turns.append(
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": [text]}
        )

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role, "content": []})
        return self._turns[-1]
