"""Converts messages of the API to those of chat templates.

- The arguments of a tool call are an object, not the JSON text of one.  A text that is not that of
  an object, as of a call that the model did not finish, becomes an empty object: a conversation
  would not go on otherwise.
- A message without content has an empty one, unless the template asks whether there is any.
- The developer speaks as the system, unless the template has a place for the developer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog

from router.text.output_parts import arguments_of
from wire.errors import ErrorCode, WireError

log = structlog.get_logger("router")

_ASKS_FOR_NONE: Final = re.compile(r"content\W{0,3}\s+is\s+(not\s+)?none", re.IGNORECASE)


def for_template(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return `messages` as the `template` with this text wants them.

    Raises:
        WireError: INVALID_REQUEST; the arguments of a tool call are neither a text nor an object.
    """
    has_developer = "developer" in template
    has_none = _ASKS_FOR_NONE.search(template) is not None
    wanted = list[dict[str, Any]]()
    # The fields whose text does not parse.
    unread = list[str]()
    for index, original in enumerate(messages):
        message = dict(original)
        if message.get("role") == "developer" and not has_developer:
            message["role"] = "system"
        if message.get("content") is None and not has_none:
            message["content"] = ""
        # Templates ask whether there is such a field, not whether it has any call.
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = _with_objects(calls, f"messages[{index}].tool_calls", unread)
        wanted.append(message)
    if unread:
        log.warning(
            "arguments of calls are not the JSON text of an object: the chat template gets none",
            calls=len(unread),
            first=unread[0],
        )
    return wanted


def _with_objects(calls: object, where: str, unread: list[str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refused(where, "expected a list of calls")
    wanted = list[dict[str, Any]]()
    for index, call in enumerate(calls):
        match call:
            case {"function": {"name": str(), **rest} as function}:
                arguments = rest.get("arguments")
            case _:
                raise _refused(f"{where}[{index}]", "expected the call of a function with a name")
        field = f"{where}[{index}].function.arguments"
        if isinstance(arguments, str):
            text, arguments = arguments.strip(), arguments_of(arguments)
            if arguments is None:
                arguments = {}
                unread += [field] if text else []
        if not isinstance(arguments, dict):
            raise _refused(field, "expected the JSON text of an object")
        wanted.append({**call, "function": {**function, "arguments": arguments}})
    return wanted


def _refused(where: str, why: str) -> WireError:
    return WireError(ErrorCode.INVALID_REQUEST, f"{where}: {why}")
