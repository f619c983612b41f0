"""Llama 3.2 and 4, pythonic: `[get(a=1, b="x"), …]`, whose literals become JSON.

The list begins the answer, or follows `<|python_start|>`; anywhere else it is content.  A call is
one when its first argument has a name, or there is none: `[text](link)` is content.  Where what
follows is no literal (a variable, a sum) the arguments end unfinished, and the rest is content.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Final

from router.text.scan import Scan, Steps
from router.text.tools.lark import Tool, Wanted, literal, refused, repeated, schema

OPEN: Final = "<|python_start|>"
CLOSE: Final = "<|python_end|>"
# Brackets in brackets; each level is a generator that every further character passes through.
MAX_DEPTH: Final = 32

# Bracket of Python: its end, and what both are in JSON.
_BRACKETS: Final = {"[": ("]", "[", "]"), "(": (")", "[", "]"), "{": ("}", "{", "}")}
_ESCAPES: Final = dict(zip("ntrabfv\\'\"\n", [*"\n\t\r\a\b\f\v\\'\"", ""], strict=True))
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_WORDS: Final = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_HEXADECIMAL: Final = frozenset("0123456789abcdefABCDEF")
# In a string.
_PLAIN: Final = re.compile(r"[^'\"\\\n]+")
_JSON_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
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
        yield from scan.space()
        if before == "{":
            scan.begin(name)
        scan.argue(f'{before}"{key}": ')
        before = ", "
        if not (yield from _value(scan)):
            return False
        yield from scan.space()
        if scan.char != ")" and not (yield from scan.literal(",")):
            return False
        yield from scan.space()
    if before == "{":
        scan.begin(name)
        scan.argue("{")
    scan.argue("}")
    scan.end_call()
    yield None
    return True


def _value(scan: Scan, depth: int = 0) -> Steps[bool]:
    """Give a literal as JSON; False where it breaks."""
    if scan.char not in _BRACKETS:
        return (yield from _scalar(scan))
    if depth == MAX_DEPTH:
        return False
    is_dict = scan.char == "{"
    end, json_begin, json_end = _BRACKETS[scan.char]
    scan.argue(json_begin)
    yield None
    yield from scan.space()
    before = ""
    while scan.char != end:
        scan.argue(before)
        before = ", "
        if (is_dict and not (yield from _key(scan))) or not (yield from _value(scan, depth + 1)):
            return False
        yield from scan.space()
        if scan.char != end and not (yield from scan.literal(",")):
            return False
        yield from scan.space()
    scan.argue(json_end)
    yield None
    return True


def _key(scan: Scan) -> Steps[bool]:
    if not (yield from _string(scan)):
        return False
    yield from scan.space()
    if not (yield from scan.literal(":")):
        return False
    scan.argue(": ")
    yield from scan.space()
    return True


def _scalar(scan: Scan) -> Steps[bool]:
    if scan.char == "'" or scan.char == '"':
        return (yield from _string(scan))
    word = yield from scan.word(lambda char: char.isalnum() or char in "_.+-")
    text = _WORDS.get(word) or _number(word)
    if text is not None:
        scan.argue(text)
    return text is not None


def _number(word: str) -> str | None:
    if _JSON_NUMBER.fullmatch(word):
        return word
    for kind in (lambda word: int(word, 0), float):
        try:
            return json.dumps(kind(word), allow_nan=False)
        except ValueError:
            pass
    return None


def _string(scan: Scan) -> Steps[bool]:
    quote = scan.char
    if quote not in ("'", '"'):
        return False
    scan.argue('"')
    yield _PLAIN
    while scan.char != quote:
        if scan.char in ("", "\n"):
            return False
        if scan.char != "\\":
            scan.argue(_in_json(scan.char))
            yield _PLAIN
        elif not (yield from _escape(scan)):
            return False
    scan.argue('"')
    yield None
    return True


def _escape(scan: Scan) -> Steps[bool]:
    """Give what an escape stands for; one that Python does not know stands for itself."""
    yield from scan.literal("\\")
    kind = scan.char
    yield from scan.literal(kind)
    digits = ""
    while len(digits) < _HEX_DIGITS.get(kind, 0):
        if scan.char not in _HEXADECIMAL:
            return False
        digits += scan.char
        yield from scan.literal(scan.char)
    if kind == "u":
        scan.argue(f"\\u{digits}")  # It may be half of a pair, and JSON has the same escape.
        return True
    code = int(digits, 16) if digits else None
    if code is not None and code > sys.maxunicode:
        return False
    scan.argue(_in_json(_ESCAPES.get(kind, f"\\{kind}") if code is None else chr(code)))
    return True


def _in_json(text: str) -> str:
    """`text` inside a string of JSON."""
    return json.dumps(text, ensure_ascii=not text.isprintable())[1:-1]


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
    """One rule for the call and two for each argument on: with and without one before it."""
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
