"""A conversation: messages for the chat template, and tools.

/v1/chat/completions, /v1/responses and /v1/messages all convert their bodies to a conversation.
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

# The role of a chat message; only the chat template interprets it.
ROLE: Final = "^[A-Za-z0-9_-]{1,64}$"
# The supported types of content parts; the field with the name of the type has the text.
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
# A chat message.  Templates may read further fields; `flat_messages` validates the ones in this
# schema.
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
        """Return the tool in the format of chat templates."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class ToolChoice(NamedTuple):
    """Whether the model may or must call tools; `names` restricts which ones, if not empty."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    names: tuple[str, ...] = ()


AUTO: Final = ToolChoice()
# How much reasoning the model should generate before its answer.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages so far, and the options for the next message."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = AUTO
    # Whether an answer may have more than one tool call.
    has_parallel_calls: bool = True
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # the template adds them
    # Whether the answer continues the last message, which the prompt then leaves open.
    continue_final_message: bool = False
    # Whether the response repeats the continued message before the answer.
    is_echoed: bool = False
    # A chat template to use instead of the model's own.
    template: str | None = None
    # Documents for retrieval-augmented generation, if the template supports them.
    documents: Sequence[Mapping[str, str]] = ()
    # Further variables for the template.
    variables: Mapping[str, Any] = field(default_factory=dict)
    # Whether the response includes reasoning.
    shows_reasoning: bool = True

    @property
    def continued(self) -> str:
        """The text of the message that the answer continues; empty if it begins a new one."""
        return "" if self.add_generation_prompt else self.messages[-1].get("content") or ""

    @property
    def visible_tools(self) -> tuple[Tool, ...]:
        """The tools in the prompt; the tool choice "none" hides all of them."""
        return () if self.tool_choice.mode == "none" else tuple(self.tools)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools in the prompt that the model may call."""
        names = self.tool_choice.names
        return tuple([tool for tool in self.visible_tools if not names or tool.name in names])


def has_generation_prompt(requested: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether the prompt ends with the beginning of a new message."""
    if requested and continue_final_message:
        raise invalid("add_generation_prompt", "begins a message; leave it out to go on with one")
    return requested is not False and not continue_final_message


def tool_choice(word: str | None) -> ToolChoice:
    """Parse a `tool_choice` that is one word; None means auto."""
    match word:
        case None | "auto":
            return AUTO
        case "none" | "required":
            return ToolChoice(word)
    raise invalid("tool_choice", "expected none, auto, required, or the name of a tool")


def check_tools(tools: Sequence[Tool], choice: ToolChoice, allowed: str = "tool_choice") -> None:
    """Refuse tools with the same name, and a choice of a tool that does not exist.

    `allowed` is the path of the names in a choice of several tools, with `{}` for the index.
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
    """Return a random id of nine letters and digits, the only kind that some templates accept."""
    return "".join([secrets.choice(ascii_letters + digits) for _ in range(9)])


def flat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with their contents as strings, for chat templates.

    In a content that is a list of parts, texts and refusals are joined; other parts are refused.
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
        fields = [part.get(kind) for kind in _TYPES] if isinstance(part, dict) else []
        text = next((each for each in fields if isinstance(each, str)), None)
        if text is None:
            expected = f"expected a part of type {' or '.join(_TYPES)}"
            raise invalid(f"{where}.content[{index}]", expected)
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
