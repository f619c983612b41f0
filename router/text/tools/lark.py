"""Building blocks of tool-call grammars, in llguidance's dialect of Lark.

A family's grammar is the rule `answer` and those it needs.  `TEXT`, any text at all, is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from wire.errors import ErrorCode, WireError

# As JSON is in the texts that models were trained on: one space, no line breaks.
_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Tool(NamedTuple):
    """A tool that may be called; its arguments are held to the JSON schema `parameters`."""

    name: str
    parameters: Mapping[str, Any]


class Wanted(NamedTuple):
    """The calls that a grammar allows."""

    tools: Sequence[Tool]
    # How a mark of the family is written in the grammar: as a token, if it is one.
    mark: Callable[[str], str]
    # False: one call and no more.
    is_several: bool
    # False: an answer may be content as well.
    is_required: bool


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def schema(parameters: Mapping[str, Any], **options: object) -> str:
    """JSON that is valid by `parameters`; options for llguidance in them are ignored."""
    return "%json " + json.dumps({**parameters, "x-guidance": {**_LAYOUT, **options}})


def arguments(tool: Tool) -> str:
    """The arguments of a call as an object.

    Raises:
        WireError: INVALID_REQUEST; they are to be something else.
    """
    if tool.parameters.get("type", "object") != "object":
        raise refused(tool, "must have the type 'object'")
    return schema({**tool.parameters, "type": "object"})


def refused(tool: Tool, why: str) -> WireError:
    return WireError(ErrorCode.INVALID_REQUEST, f"tools: the parameters of {tool.name!r} {why}")


def objects(tools: Sequence[Tool], key: str) -> str:
    """A call as `{"name": …, key: {…}}`: the rule `object`."""
    begins = [f'{{"name": {json.dumps(tool.name)}, "{key}": ' for tool in tools]
    return "object: " + "\n  | ".join(
        f'{literal(begin)} {arguments(tool)} "}}"'
        for begin, tool in zip(begins, tools, strict=True)
    )


def repeated(item: str, separator: str, is_several: bool) -> str:
    return f"{item} ({literal(separator)} {item})*" if is_several else item


def marked(wanted: Wanted, mark: str, calls: str, rest: str, *, is_several: bool) -> str:
    """A grammar of calls that begin with `mark`: required, they are `calls`; else after content."""
    written = wanted.mark(mark)
    rules = (
        calls if wanted.is_required else f"(upto rest){'*' if is_several else '?'} TEXT",
        f"call: {written} rest",
        upto(written),
        f"rest: {rest}",
        objects(wanted.tools, "arguments"),
    )
    return "answer: " + "\n".join(rules)


def upto(mark: str, rule: str = "upto") -> str:
    """Text up to and with `mark`.  A mark that is no token ends it lazily."""
    is_token = mark.startswith("<[")
    return f"{rule}{'' if is_token else '[lazy]'}: TEXT {mark}"
