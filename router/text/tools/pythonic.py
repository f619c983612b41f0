"""Llama 3.2 and 4 with Python syntax: `[get(a=1, b="x"), …]`, whose literals become JSON.

The list is at the beginning of the answer or after `<|python_start|>`; anywhere else it is content.
A call has only named arguments or none, so `[text](link)` is content.  An argument is emitted when
it is complete.  It may be a Python literal (string, signed number, list, tuple, set or dictionary)
or one of JSON's words.  If it is something else (a variable, a sum), the call ends unfinished, and
the rest is content.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from threading import Lock
from typing import Any, Final

from router.text.scan import Scan, Steps
from router.text.tools.lark import AllowedCalls, Tool, literal, refused, repeated, schema

OPEN: Final = "<|python_start|>"
CLOSE: Final = "<|python_end|>"
MARKS: Final = (OPEN, CLOSE)
# Limits of an argument: nested brackets, and characters outside strings.  Python's parser takes a
# few milliseconds for numbers of this length and blocks the event loop meanwhile.
MAX_DEPTH: Final = 32
MAX_LENGTH: Final = 8192

_WORDS: Final = {"true": True, "false": False, "null": None}
# Characters of literals without syntactic meaning, outside and inside strings.
_CODE: Final = re.compile(r"[\w\s.+:-]+")
_QUOTED: Final = re.compile(r"[^'\"\\\n]+")
# Guards Python's warning filters, which are global to the process.
_silence: Final = Lock()
# The keywords that a schema may have: arguments are not a JSON object, so others do not apply.
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_OF_PARAMETERS: Final = _DEFINITIONS | {
    *("type", "properties", "required", "additionalProperties"),
    *("title", "description", "$schema", "x-guidance"),
}
# Escapes with the same meaning in JSON and Python.
_SHARED: Final = '"\\bfnrtu'


def read(scan: Scan) -> Steps[None]:
    if scan.is_blank:
        yield from scan.read_list(_call)
    while mark := (yield from scan.until(OPEN, CLOSE)):
        if mark == OPEN:
            yield from scan.read_list(_call)
        elif scan.is_after_call:
            scan.drop()


def _call(scan: Scan) -> Steps[bool]:
    """Parse a call; return False if there is none or it is malformed."""
    name = yield from scan.name()
    if not name or not (yield from scan.literal("(")):
        return False
    yield from scan.space()
    separator = "{"
    while scan.char != ")":
        key = yield from scan.name()
        yield from scan.space()
        if not key or not (yield from scan.literal("=")):
            return False
        if separator == "{":
            scan.begin(name)
        scan.add_arguments(f'{separator}"{key}": ')
        separator = ", "
        value = _in_json((yield from _argument(scan)))
        if value is None:
            return False
        scan.add_arguments(value)
        yield from scan.literal(",")
        yield from scan.space()
    if separator == "{":
        scan.begin(name)
        scan.add_arguments("{")
    scan.add_arguments("}")
    scan.end_call()
    yield None
    return True


def _argument(scan: Scan) -> Steps[str]:
    """Buffer and return an argument, up to the comma or bracket that ends it.

    Return "" if nothing ends it, if it cannot be a literal, or if it exceeds the limits.
    """
    begin, depth, length = scan.num_buffered, 0, 0
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
        scan.buffer(char)
        yield _CODE
    return scan.buffered_from(begin) if scan.char else ""


def _string(scan: Scan) -> Steps[bool]:
    """Buffer a string in single or triple quotes; return False if it does not end."""
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
        scan.buffer(char)
        yield None if is_escaped or num_quotes else _QUOTED
        if num_quotes == len(end):
            return True
    return False


def _in_json(argument: str) -> str | None:
    """Convert a Python literal to JSON; return None if that is not possible."""
    try:
        with _silence, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Unknown escapes are kept.
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


def grammar(allowed: AllowedCalls) -> str:
    rules = list[str]()
    for index, tool in enumerate(allowed.tools):
        rules += _call_rules(f"call{index}", tool)
    alternatives = " | ".join(f"call{index}" for index in range(len(allowed.tools)))
    other = "" if allowed.is_required else " | OTHER"
    return "\n".join(
        [
            f'answer: "[" {repeated("call", ", ", allowed.is_several)} "]"{other}',
            r"OTHER: /\s*([^\s\[](.|\n)*)?/",
            f"call: {alternatives}",
            *rules,
        ]
    )


def _call_rules(rule: str, tool: Tool) -> list[str]:
    """Return the rules for a call of `tool` with its arguments in the order of the schema.

    For each argument there are two rules: `first` if no argument precedes it, and `after`, which
    begins with a comma.  Each includes what follows, so an optional argument can be left out:

        call0: "f" "(" call0_first0 ")"
        call0_first0: "a" "=" VALUE call0_after1 | call0_first1
        call0_after0: ", " "a" "=" VALUE call0_after1 | call0_after1
        call0_first1: ""
        call0_after1: ""
    """
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


def matches(template: str) -> bool:
    return "[func_name1(" in template
