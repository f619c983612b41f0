"""Llama 3.2 and 4, pythonic: `[get(a=1, b="x"), …]`, whose literals become JSON.

The list begins the answer, or follows `<|python_start|>`; anywhere else it is content.  A call is
one when its first argument has a name, or there is none: `[text](link)` is content.  Each argument
is given when its text is complete, as Python reads it: strings of every kind, numbers with signs,
lists, tuples, sets and dictionaries, and the words of JSON.  Where it is no literal (a variable, a
sum) the call ends unfinished, and the rest is content.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from threading import Lock
from typing import Any, Final

from router.text.scan import Scan, Steps
from router.text.tools.lark import Tool, Wanted, literal, refused, repeated, schema

OPEN: Final = "<|python_start|>"
CLOSE: Final = "<|python_end|>"
MARKS: Final = (OPEN, CLOSE)
# Of an argument: brackets in brackets, and characters outside strings.  Python's parser takes some
# milliseconds for so many numbers, during which nothing else runs.
MAX_DEPTH: Final = 32
MAX_LENGTH: Final = 8192

_WORDS: Final = {"true": True, "false": False, "null": None}
# Characters of literals, outside strings and in one, that neither open nor end anything.
_CODE: Final = re.compile(r"[\w\s.+:-]+")
_QUOTED: Final = re.compile(r"[^'\"\\\n]+")
# Whether Python warns is one setting of the whole process.
_silence: Final = Lock()
# What `parameters` of a tool may have for a grammar: its arguments are no object of JSON.
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_OF_PARAMETERS: Final = _DEFINITIONS | {
    *("type", "properties", "required", "additionalProperties"),
    *("title", "description", "$schema", "x-guidance"),
}
# The escapes that mean in JSON what they mean in Python.
_SHARED: Final = '"\\bfnrtu'


def read(scan: Scan) -> Steps[None]:
    if scan.is_blank:
        yield from scan.listed(_call)
    while mark := (yield from scan.until(OPEN, CLOSE)):
        if mark == OPEN:
            yield from scan.listed(_call)
        elif scan.is_after_call:
            scan.drop()


def _call(scan: Scan) -> Steps[bool]:
    """Read a call; False where there is none, or where it breaks."""
    name = yield from scan.name()
    if not name or not (yield from scan.literal("(")):
        return False
    yield from scan.space()
    before = "{"
    while scan.char != ")":
        key = yield from scan.name()
        yield from scan.space()
        if not key or not (yield from scan.literal("=")):
            return False
        if before == "{":
            scan.begin(name)
        scan.argue(f'{before}"{key}": ')
        before = ", "
        value = _in_json((yield from _argument(scan)))
        if value is None:
            return False
        scan.argue(value)
        yield from scan.literal(",")
        yield from scan.space()
    if before == "{":
        scan.begin(name)
        scan.argue("{")
    scan.argue("}")
    scan.end_call()
    yield None
    return True


def _argument(scan: Scan) -> Steps[str]:
    """Hold an argument, up to the comma or bracket that ends it, and return it.

    It is empty where none ends it, where it is no literal for sure, and where it is too much.
    """
    begin, depth, length = scan.num_held, 0, 0
    while (char := scan.char) and (depth or char not in (",", ")")):
        if char in ("'", '"'):
            if not (yield from _string(scan)):
                return ""
            continue
        depth += (char in ("(", "[", "{")) - (char in (")", "]", "}"))
        length += len(char)
        is_code = char in ("(", "[", "{", ")", "]", "}", ",") or _CODE.match(char)
        if not is_code or not 0 <= depth <= MAX_DEPTH or length > MAX_LENGTH:
            return ""
        scan.keep(char)
        yield _CODE
    return scan.held_from(begin) if scan.char else ""


def _string(scan: Scan) -> Steps[bool]:
    """Hold a string in one or three quotes; False where it does not end."""
    quote = end = scan.char
    yield from scan.literal(quote)
    if (yield from scan.literal(quote)):
        if not (yield from scan.literal(quote)):
            return True
        end = 3 * quote
    num_quotes = 0
    is_escaped = False
    while (char := scan.char) and (char != "\n" or is_escaped or len(end) == 3):
        num_quotes = num_quotes + 1 if char == quote and not is_escaped else 0
        is_escaped = char == "\\" and not is_escaped
        scan.keep(char)
        yield None if is_escaped or num_quotes else _QUOTED
        if num_quotes == len(end):
            return True
    return False


def _in_json(argument: str) -> str | None:
    """Return a literal of Python in JSON; None where it is none that JSON can say."""
    try:
        with _silence, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Unknown escapes are as the model wrote them.
            tree = ast.parse(f"f(a={argument})", mode="eval").body
        match tree:
            case ast.Call(args=[], keywords=[ast.keyword(value=node)]):
                value = _value(node)
                text = json.dumps(value, ensure_ascii=False, allow_nan=False)
                return text if text.isprintable() else json.dumps(value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return None


def _value(node: ast.expr | None) -> Any:
    match node:
        case ast.List(elts) | ast.Tuple(elts) | ast.Set(elts):
            return [_value(each) for each in elts]
        case ast.Dict(keys, values):
            return {_value(key): _value(each) for key, each in zip(keys, values, strict=True)}
        case ast.Name(word) if word in _WORDS:
            return _WORDS[word]
        case ast.Constant(value):
            return value
        case ast.UnaryOp():
            return ast.literal_eval(node)
    raise ValueError("no literal")


def grammar(wanted: Wanted) -> str:
    rules = list[str]()
    for index, tool in enumerate(wanted.tools):
        rules += _call_rules(f"call{index}", tool)
    alternatives = " | ".join(f"call{index}" for index in range(len(wanted.tools)))
    other = "" if wanted.is_required else " | OTHER"
    return "\n".join(
        [
            f'answer: "[" {repeated("call", ", ", wanted.is_several)} "]"{other}',
            r"OTHER: /\s*([^\s\[](.|\n)*)?/",
            f"call: {alternatives}",
            *rules,
        ]
    )


def _call_rules(rule: str, tool: Tool) -> list[str]:
    """One rule for the call, and two for each argument on: first, or after another."""
    parameters = tool.parameters
    if unknown := parameters.keys() - _OF_PARAMETERS:
        raise refused(tool, f"cannot have {min(unknown)!r}: this model calls in Python's syntax")
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise refused(tool, "have properties that are no object, or required that is no list")
    definitions = {key: parameters[key] for key in _DEFINITIONS & parameters.keys()}
    names = dict.fromkeys([*properties, *required])
    rules = [f'{rule}: {literal(tool.name)} "(" {rule}_first0 ")"']
    for index, name in enumerate(names):
        value = properties.get(name, {})
        if not str(name).isidentifier() or not isinstance(value, dict):
            raise refused(
                tool, f"cannot have {name!r} as it is: this model calls in Python's syntax"
            )
        of_value = schema({**value, **definitions}, json_allowed_escapes=_SHARED)
        one = f'{literal(name)} "=" {of_value} {rule}_after{index + 1}'
        first = "" if name in required else f" | {rule}_first{index + 1}"
        after = "" if name in required else f" | {rule}_after{index + 1}"
        rules.append(f"{rule}_first{index}: {one}{first}")
        rules.append(f'{rule}_after{index}: ", " {one}{after}')
    return [*rules, f'{rule}_first{len(names)}: ""', f'{rule}_after{len(names)}: ""']


def speaks(template: str) -> bool:
    return "[func_name1(" in template
