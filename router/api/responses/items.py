"""Items: the parts of a conversation in this API, and their conversion to chat messages.

A message, reasoning, a function call and its output are one item each.  An assistant's reasoning,
message and function calls of one turn become one chat message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from router.api.errors import invalid
from wire.errors import shown

ROLES: Final = ("user", "assistant", "system", "developer")
# The types of content parts that have text.
TEXTS: Final = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
# The prefix of an item id for each type of item.
PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


class Part(Struct):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Struct):
    """An item of any type; `check` validates the fields that its type requires."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None

    def check(self, where: str) -> None:
        """Raise a 400 if the item is invalid or not text; `where` is its position in the body."""
        needed = _NEEDED.get(self.type)
        if needed is None:
            known = ", ".join(_NEEDED)
            raise invalid(f"{where}.type", f"{shown(self.type)} is not one of {known}")
        for name in needed:
            if getattr(self, name) is None:
                raise invalid(f"{where}.{name}", f"is missing; a {self.type} needs it")
        if self.type == "message" and self.role not in ROLES:
            raise invalid(f"{where}.role", f"expected one of {', '.join(ROLES)}")
        for name in ("content", "output", "summary"):
            parts = getattr(self, name)
            for index, part in enumerate(parts if isinstance(parts, list) else ()):
                place = f"{where}.{name}[{index}]"
                if part.type not in TEXTS:
                    raise invalid(
                        f"{place}.type", f"{shown(part.type)} is not supported: send text only"
                    )
                if part.text is None and part.refusal is None:
                    raise invalid(f"{place}.text", "is missing")
        if self.type == "reasoning" and self.encrypted_content and not self.reasoning:
            raise invalid(
                f"{where}.encrypted_content",
                "can be read only by who encrypted it; leave the item out, or send its content",
            )

    @property
    def reasoning(self) -> str:
        """The content of a reasoning item, or its summary if the content is empty."""
        return _text(self.content) or _text(self.summary)

    @property
    def is_cut_call(self) -> bool:
        """Whether the item is an unfinished call: the answer ended within its arguments."""
        return self.type == "function_call" and self.status == "incomplete"

    def document(self, name: str) -> dict[str, Any]:
        """Return the item as a JSON object; `name` is its id if it has none."""
        status = "incomplete" if self.status == "incomplete" else "completed"
        body: dict[str, Any] = {"id": self.id or name, "type": self.type, "status": status}
        if self.type == "message":
            text = _text(self.content)
            part = {"type": "input_text", "text": text}
            part = text_part(text) if self.role == "assistant" else part
            return body | {"role": self.role, "content": [part]}
        if self.type == "reasoning":
            part = {"type": "reasoning_text", "text": self.reasoning}
            return body | {"summary": [], "content": [part]}
        if self.type == "function_call":
            call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
            return body | call
        return body | {"call_id": self.call_id, "output": _text(self.output)}


_NEEDED: Final = {
    "message": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a content part with the assistant's text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def item_name(kind: str, key: str, index: int) -> str:
    """Return the id of the item at `index` of the response with this `key`."""
    return f"{PREFIXES[kind]}_{key}{index:03x}"


def encode_items(items: Iterable[Item], key: str) -> bytes:
    """Encode items as a JSON list, adding missing ids."""
    documents = [
        # "i" keeps these ids different from those of output items.
        item.document(item_name(item.type, f"{key}i", index))
        for index, item in enumerate(items)
    ]
    return msgspec.json.encode(documents)


def messages_of(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Convert items to chat messages after the instructions; omit unfinished calls."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item.is_cut_call:
            continue
        if item.type == "function_call_output":
            output = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            messages.append(output)
        elif item.type == "message" and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
        else:
            if not (messages and _belongs_to(messages[-1], item)):
                messages.append({"role": "assistant", "content": None})
            _add(messages[-1], item)
    return messages


def _belongs_to(message: dict[str, Any], item: Item) -> bool:
    # An assistant message has reasoning, then text, then calls; each is optional.
    if message["role"] != "assistant":
        return False
    if item.type == "function_call":
        return True
    has_text = message["content"] is not None or "tool_calls" in message
    return not has_text and (item.type == "message" or "reasoning_content" not in message)


def _add(message: dict[str, Any], item: Item) -> None:
    if item.type == "message":
        message["content"] = _text(item.content)
    elif item.type == "reasoning":
        message["reasoning_content"] = item.reasoning
    else:
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _text(content: str | list[Part] | None) -> str:
    if isinstance(content, list):
        return "\n".join([part.text or part.refusal or "" for part in content])
    return content or ""
