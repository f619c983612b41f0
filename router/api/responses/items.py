"""Items: the parts of a conversation in this API, and the chat messages that they become.

A message, reasoning, a call of a function and its output are an item each.  What the assistant
reasoned, said and called in one turn is one message of a chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from router.api.errors import invalid
from wire.errors import shown

ROLES: Final = ("user", "assistant", "system", "developer")
# Parts of text, by any name that a client may have them under.
TEXTS: Final = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
# Item ids tell what they name.
PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


class Part(Struct):
    """A part of a content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Struct):
    """An item of any type: `check` says which fields it needs."""

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
        """Refuse what a chat template has no place for; `where` names the item."""
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
                part_of = f"{where}.{name}[{index}]"
                if part.type not in TEXTS:
                    raise invalid(
                        f"{part_of}.type", f"{shown(part.type)} is not supported: send text only"
                    )
                if part.text is None and part.refusal is None:
                    raise invalid(f"{part_of}.text", "is missing")
        if self.type == "reasoning" and self.encrypted_content and not self.reasoning:
            raise invalid(
                f"{where}.encrypted_content",
                "can be read only by who encrypted it; leave the item out, or send its content",
            )

    @property
    def reasoning(self) -> str:
        """The text of a reasoning item: in full, or else its summary."""
        return _text(self.content) or _text(self.summary)

    @property
    def is_cut_call(self) -> bool:
        """Whether it is a call that was never made: the answer ended within its arguments."""
        return self.type == "function_call" and self.status == "incomplete"

    def document(self, name: str) -> dict[str, Any]:
        """Return the item as this API shows it; `name` is for one that has none."""
        status = "incomplete" if self.status == "incomplete" else "completed"
        body: dict[str, Any] = {"id": self.id or name, "type": self.type, "status": status}
        if self.type == "message":
            text = _text(self.content)
            part = said(text) if self.role == "assistant" else {"type": "input_text", "text": text}
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


def said(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the part of a message in which the assistant says this."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def item_name(kind: str, key: str, index: int) -> str:
    """Return the id of an item: `key` is that of its response, `index` its place."""
    return f"{PREFIXES[kind]}_{key}{index:03x}"


def encode_items(items: Iterable[Item], key: str) -> bytes:
    """Return items as a list in JSON, those without an id with one."""
    documents = [
        # Not the ids that the output will have.
        item.document(item_name(item.type, f"{key}i", index))
        for index, item in enumerate(items)
    ]
    return msgspec.json.encode(documents)


def messages_of(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a chat, the instructions first; a call that was cut is in none."""
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
            if not (messages and _takes(messages[-1], item)):
                messages.append({"role": "assistant", "content": None})
            _add(messages[-1], item)
    return messages


def _takes(message: dict[str, Any], item: Item) -> bool:
    # A turn of the assistant is reasoning, then text, then calls, each of which may be missing.
    if message["role"] != "assistant":
        return False
    if item.type == "function_call":
        return True
    has_said = message["content"] is not None or "tool_calls" in message
    return not has_said and (item.type == "message" or "reasoning_content" not in message)


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
