"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and later `[TOOL_CALLS]name[ARGS]{…}`.

The later form is repeated for each call.  `[ARGS]` may be missing or follow `[CALL_ID]` and an id.
"""

from __future__ import annotations

from typing import Final

from router.text.scan import Scan, Steps
from router.text.tools.json_call import json_call, named_call
from router.text.tools.lark import AllowedCalls, arguments, literal, marked, repeated

MARK: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
MARKS: Final = (MARK, ARGS, CALL_ID)


def read(scan: Scan) -> Steps[None]:
    while (yield from scan.until(MARK)):
        yield from scan.space()
        if scan.char == "[":
            yield from scan.read_list(json_call)
        else:
            yield from _named(scan)


def _named(scan: Scan) -> Steps[None]:
    name = yield from scan.name()
    yield from scan.space()
    if (yield from scan.literal("[")):
        if scan.char == CALL_ID[1]:
            yield from scan.literal(CALL_ID[1:])
            yield from scan.word(str.isalnum)
            yield from scan.literal("[")
        if not (yield from scan.literal(ARGS[1:])):
            return
        yield from scan.space()
    if name and scan.char == "{":
        yield from named_call(scan, name)


def grammar(allowed: AllowedCalls) -> str:
    args = allowed.mark(ARGS)
    if args == literal(ARGS):  # Not a token: this model generates the list form.
        rest = f'" "? "[" {repeated("object", ", ", allowed.is_several)} "]"'
        is_several = False
    else:
        rest = "\n  | ".join(
            f"{literal(tool.name)} {args} {arguments(tool)}" for tool in allowed.tools
        )
        is_several = allowed.is_several
    calls = "call+" if is_several else "call"
    return marked(allowed, MARK, calls, rest, is_several=is_several)


def matches(template: str) -> bool:
    return MARK in template
