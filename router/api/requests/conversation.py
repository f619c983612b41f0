"""A request's conversation: messages in the form of chat templates, and tools.

Chats, responses and messages all come down to this.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_letters, digits
from typing import Annotated, Any, Final, Literal, NamedTuple

from msgspec import Meta

from router.api.errors import invalid, listed
from wire.errors import shown

MAX_TOOLS: Final = 128
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]

# Of a chat message: what it means is the chat template's affair.
ROLE: Final = "^[A-Za-z0-9_-]{1,64}$"
# The types of content parts that are taken; the field of that name holds the text.
_TYPES: Final = ("text", "refusal")
_PARTS: Final = [
    {
        "type": "object",
        "properties": {"type": {"enum": [kind]}, kind: {"type": "string"}},
        "required": ["type", kind],
    }
    for kind in _TYPES
]
_CONTENT: Final = [
    {"type": "string"},
    {"type": "array", "items": {"anyOf": _PARTS}},
    {"type": "null"},
]
# A message of a chat.  Templates read fields of their own; `flat_messages` checks those that it
# shows in the description of the API.
ChatMessage = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "properties": {"role": {"pattern": ROLE}, "content": {"anyOf": _CONTENT}},
            "required": ["role"],
        }
    ),
]


class Tool(NamedTuple):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False

    def described(self) -> dict[str, Any]:
        """Return it as chat templates want it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class ToolChoice(NamedTuple):
    """Whether the model may or must call tools; `names` restricts them, if given."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    names: tuple[str, ...] = ()


AUTO: Final = ToolChoice()
# How much a model is to reason before it answers.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation so far, in messages of a chat, and constraints on its next message."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = AUTO
    # Whether one answer may have several calls.
    has_parallel_calls: bool = True
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # the template writes them itself
    # Whether the answer goes on with the last message, which then has no end yet.
    continue_final_message: bool = False
    # Whether the answer begins with the message that it goes on with.
    is_echoed: bool = False
    # A template instead of the model's own.
    template: str | None = None
    # What the answer is to be drawn from, where the template has a place for it.
    documents: Sequence[Mapping[str, str]] = ()
    # Further variables of the template.
    variables: Mapping[str, Any] = field(default_factory=dict)
    # Whether what the model reasons is part of the answer.
    shows_reasoning: bool = True

    @property
    def continued(self) -> str:
        """The last message, where the answer goes on with it and begins none of its own."""
        return "" if self.add_generation_prompt else self.messages[-1].get("content") or ""

    @property
    def visible_tools(self) -> tuple[Tool, ...]:
        """The tools in the prompt: with the tool choice none, none at all."""
        return () if self.tool_choice.mode == "none" else tuple(self.tools)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools in the prompt that the model may call."""
        names = self.tool_choice.names
        return tuple([tool for tool in self.visible_tools if not names or tool.name in names])


def has_generation_prompt(asked: bool | None, continue_final_message: bool | None) -> bool:
    """Tell whether the prompt ends with the beginning of a new message."""
    if asked and continue_final_message:
        raise invalid("add_generation_prompt", "begins a message; leave it out to go on with one")
    return asked is not False and not continue_final_message


def tool_choice(word: str | None) -> ToolChoice:
    """Return the tool choice given by one word; None means auto."""
    match word:
        case None | "auto":
            return AUTO
        case "none" | "required":
            return ToolChoice(word)
    raise invalid("tool_choice", "expected none, auto, required, or the name of a tool")


def check_tools(tools: Sequence[Tool], choice: ToolChoice, allowed: str = "tool_choice") -> None:
    """Refuse tools that nobody could tell apart, and a choice of none of them.

    `allowed` is where a name stands that is one of several, with `{}` for which of them.
    """
    names = [tool.name for tool in tools]
    for index, tool in enumerate(tools):
        if tool.name in names[:index]:
            raise invalid(f"tools[{index}]", f"there are two tools named {tool.name}")
    if (choice.mode == "required" or choice.names) and not tools:
        raise invalid("tool_choice", "is for requests with tools, and there are none")
    for index, name in enumerate(choice.names):
        if name not in names:
            place = "tool_choice" if choice.mode == "named" else allowed.format(index)
            raise invalid(place, f"{shown(name)} is none of the tools: {listed(names)}")


def new_call_id() -> str:
    """Return an id of nine letters and digits: some templates take no other back."""
    return "".join([secrets.choice(ascii_letters + digits) for _ in range(9)])


def flat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are strings, as chat templates want them.

    A content may be a list of parts: those of text and refusals are joined, others are refused.
    """
    return [_flat_message(f"messages[{index}]", each) for index, each in enumerate(messages)]


def _flat_message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not re.fullmatch(ROLE, role):
        raise invalid(f"{where}.role", "expected up to 64 letters, digits, - and _")
    content = message.get("content")
    if isinstance(content, str) or (content is None and role == "assistant"):
        return message
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "expected a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        said = [part.get(kind) for kind in _TYPES] if isinstance(part, dict) else []
        text = next((each for each in said if isinstance(each, str)), None)
        if text is None:
            expected = f"expected a part of type {' or '.join(_TYPES)}"
            raise invalid(f"{where}.content[{index}]", expected)
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
