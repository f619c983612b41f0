"""Building blocks for tool-call grammars, in llguidance's dialect of Lark.

The grammar of a family defines the rule `answer` and the rules it uses.  The terminal `TEXT`, which
matches any text, is predefined.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from wire.errors import ErrorCode, WireError

# JSON as in training data: one space after separators, no line breaks.
_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Tool(NamedTuple):
    """A tool that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


class AllowedCalls(NamedTuple):
    """The calls that a grammar allows."""

    tools: Sequence[Tool]
    # Converts a mark to grammar syntax: a token reference if the mark is a token.
    mark: Callable[[str], str]
    # Whether there may be more than one call.
    is_several: bool
    # Whether the answer must be calls; if not, it may also be content.
    is_required: bool


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def schema(parameters: Mapping[str, Any], **options: object) -> str:
    """Return an expression for JSON of this schema, whose own llguidance options are ignored."""
    return "%json " + json.dumps({**parameters, "x-guidance": {**_LAYOUT, **options}})


def arguments(tool: Tool) -> str:
    """Return an expression for the arguments of a call, a JSON object.

    Raises:
        WireError: INVALID_REQUEST; the schema has another type.
    """
    if tool.parameters.get("type", "object") != "object":
        raise refused(tool, "must have the type 'object'")
    return schema({**tool.parameters, "type": "object"})


def refused(tool: Tool, why: str) -> WireError:
    return WireError(ErrorCode.INVALID_REQUEST, f"tools: the parameters of {tool.name!r} {why}")


def objects(tools: Sequence[Tool], key: str) -> str:
    """Return the rule `object`, a call of the form `{"name": …, key: {…}}`."""
    begins = [f'{{"name": {json.dumps(tool.name)}, "{key}": ' for tool in tools]
    return "object: " + "\n  | ".join(
        f'{literal(begin)} {arguments(tool)} "}}"'
        for begin, tool in zip(begins, tools, strict=True)
    )


def repeated(item: str, separator: str, is_several: bool) -> str:
    return f"{item} ({literal(separator)} {item})*" if is_several else item


def marked(allowed: AllowedCalls, mark: str, calls: str, rest: str, *, is_several: bool) -> str:
    """Return a grammar for calls that begin with `mark`; optional ones may follow content."""
    written = allowed.mark(mark)
    rules = (
        calls if allowed.is_required else f"(upto rest){'*' if is_several else '?'} TEXT",
        f"call: {written} rest",
        upto(written),
        f"rest: {rest}",
        objects(allowed.tools, "arguments"),
    )
    return "answer: " + "\n".join(rules)


def upto(mark: str, rule: str = "upto") -> str:
    """Return a rule for text through the first `mark`, lazy if the mark is not a token."""
    is_token = mark.startswith("<[")
    return f"{rule}{'' if is_token else '[lazy]'}: TEXT {mark}"
