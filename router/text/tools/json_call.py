"""Parses a tool call that is a JSON object, `{"name": …, "arguments": {…}}`, in any member order.

The arguments are emitted as the model generates them, from the opening brace to the closing one,
even if they are not valid JSON; the call is finished only if they are.  Before the arguments, a
call must be valid JSON and have a name.  If `arguments` comes before `name`, it is buffered until
the name is known.  Other members are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from router.text.scan import Scan, Steps

ARGUMENTS: Final = ("arguments", "parameters")
# Characters without syntactic meaning, inside and outside strings.
_QUOTED: Final = re.compile(r'[^"\\]+')
_UNQUOTED: Final = re.compile(r'[^"{}\[\]<]+')
_ENDS_OF_SCALARS: Final = frozenset('{}[],:" \t\r\n')


def json_call(scan: Scan, *, needs_arguments: bool = False, breaks: str = "") -> Steps[bool]:
    """Parse a call at the current character; if there is none, buffer the text and return False.

    A call without arguments gets `{}`; with `needs_arguments` it is content.  A character of
    `breaks` outside strings ends arguments whose closing braces are missing.
    """
    name = early = ""
    if not (yield from scan.literal("{")):
        return False
    while True:
        key = yield from _key(scan)
        if key == "name" and not name:
            name = (yield from _string(scan)) or ""
            if not name or not name.isprintable():  # An unpaired surrogate is not printable.
                return False
            if early:
                scan.begin(name)
                scan.add_arguments(early)
                scan.end_call()
                break
        elif key in ARGUMENTS and not early:
            if scan.char != "{":
                return False
            if name:
                yield from named_call(scan, name, breaks)
                break
            early = yield from _buffered(scan)
        elif key is None or not (yield from _buffered(scan)):
            return False
        yield from scan.space()
        if scan.char == "}" and name and not needs_arguments:
            scan.begin(name)
            scan.add_arguments("{}")
            scan.end_call()
            break
        if not (yield from scan.literal(",")):
            return False
    yield from _rest(scan)
    return True


def named_call(scan: Scan, name: str, breaks: str = "") -> Steps[None]:
    """Parse the arguments of call `name` at the current character."""
    scan.begin(name)
    yield from _value(scan, scan.add_arguments, breaks)
    scan.end_call()


def _rest(scan: Scan) -> Steps[None]:
    """Skip the rest of the object, as far as it is valid JSON."""
    yield from scan.space()
    while (yield from scan.literal(",")):
        if (yield from _key(scan)) is None or not (yield from _buffered(scan)):
            return
        yield from scan.space()
    if (yield from scan.literal("}")):
        scan.drop()


def _key(scan: Scan) -> Steps[str | None]:
    """Buffer a key with its colon and whitespace, and return it; None if there is no key."""
    yield from scan.space()
    key = yield from _string(scan)
    yield from scan.space()
    if key is None or not (yield from scan.literal(":")):
        return None
    yield from scan.space()
    return key


def _string(scan: Scan) -> Steps[str | None]:
    """Buffer a string and return its value; None if there is no valid string."""
    if scan.char != '"':
        return None
    try:
        text: str = json.loads((yield from _buffered(scan)))
    except ValueError:
        return None
    return text


def _buffered(scan: Scan) -> Steps[str]:
    """Buffer a value and return its text."""
    begin = scan.num_buffered
    yield from _value(scan, scan.buffer, "")
    return scan.buffered_from(begin)


def _value(scan: Scan, emit: Callable[[str], None], breaks: str) -> Steps[None]:
    """Call `emit` for the characters of a value, whose end is found by quotes and brackets."""
    if scan.char not in '{["':
        while scan.char and scan.char not in _ENDS_OF_SCALARS:
            emit(scan.char)
            yield None
        return
    depth = 0
    is_quoted = is_escaped = False
    while char := scan.char:
        if is_escaped:
            is_escaped = False
        elif is_quoted:
            is_escaped = char == "\\"
            is_quoted = char != '"'
        elif char == '"':
            is_quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char in breaks:
            return
        emit(char)
        if depth == 0 and not is_quoted:
            yield None
            return
        yield _QUOTED if is_quoted else _UNQUOTED
