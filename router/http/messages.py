"""The messages of a chat, flat: every content a string, as chat templates want it."""

from __future__ import annotations

from typing import Any, Final

from router.http.asgi import HttpError

# Those of the API; `function` is the older name of `tool`.
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


def flat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are strings: text parts joined, other parts refused.

    Raises:
        HttpError: 400; names the message.
    """
    return [_flat_message(f"messages[{index}]", each) for index, each in enumerate(messages)]


def invalid(param: str | None, problem: str) -> HttpError:
    """Return the 400 that names a field and what is wrong with it."""
    message = f"{param}: {problem}" if param else problem
    return HttpError(400, message, code="invalid_value", param=param)


def _flat_message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") not in ROLES:
        raise invalid(f"{where}.role", f"expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant"):
        return message
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "expected a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise invalid(f"{where}.content[{index}]", "expected a part of type text")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}
