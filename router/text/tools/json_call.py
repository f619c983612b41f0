"""A tool call as a JSON object, `{"name": …, "arguments": {…}}`, its members in any order.

The arguments are the model's own text of that object, given as it comes: from its brace to the one
that closes it, well-formed or not, since whoever asked can do more with it than with nothing; the
call is finished only if they are well-formed.  Up
to its arguments a call must be good JSON and have a name; if `arguments` come before `name` they
are held until the name is known.  Members of any other name are read over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from router.text.scan import Scan, Steps

ARGUMENTS: Final = ("arguments", "parameters")
# Characters that change nothing, in a string and outside.
_QUOTED: Final = re.compile(r'[^"\\]+')
_UNQUOTED: Final = re.compile(r'[^"{}\[\]<]+')
_ENDS_OF_SCALARS: Final = frozenset('{}[],:" \t\r\n')


def json_call(scan: Scan, *, needs_arguments: bool = False, breaks: str = "") -> Steps[bool]:
    """Read a call that begins here; if there is none return False and hold back the text read.

    A call without arguments has `{}`, unless it `needs_arguments` to be told from an object that is
    content.  A character of `breaks` outside strings ends arguments whose braces do not close.
    """
    name = early = ""
    if not (yield from scan.literal("{")):
        return False
    while True:
        key = yield from _key(scan)
        if key == "name" and not name:
            name = (yield from _string(scan)) or ""
            if not name or not name.isprintable():  # Half a surrogate pair is not printable.
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
            early = yield from _held(scan)
        elif key is None or not (yield from _held(scan)):
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
    """Read the arguments of call `name`, which begin here."""
    scan.begin(name)
    yield from _value(scan, scan.add_arguments, breaks)
    scan.end_call()


def _rest(scan: Scan) -> Steps[None]:
    """Leave out the object's rest, as far as it is good JSON."""
    yield from scan.space()
    while (yield from scan.literal(",")):
        if (yield from _key(scan)) is None or not (yield from _held(scan)):
            return
        yield from scan.space()
    if (yield from scan.literal("}")):
        scan.drop()


def _key(scan: Scan) -> Steps[str | None]:
    """Hold a key with its colon and the space around; None where there is none."""
    yield from scan.space()
    key = yield from _string(scan)
    yield from scan.space()
    if key is None or not (yield from scan.literal(":")):
        return None
    yield from scan.space()
    return key


def _string(scan: Scan) -> Steps[str | None]:
    """Hold back a string and return its value; None if there is none."""
    if scan.char != '"':
        return None
    try:
        text: str = json.loads((yield from _held(scan)))
    except ValueError:
        return None
    return text


def _held(scan: Scan) -> Steps[str]:
    """Hold a value and return its text."""
    begin = scan.num_held
    yield from _value(scan, scan.keep, "")
    return scan.held_from(begin)


def _value(scan: Scan, give: Callable[[str], None], breaks: str) -> Steps[None]:
    """Give the characters of a value, as far as quotes and the number of braces tell its end."""
    if scan.char not in '{["':
        while scan.char and scan.char not in _ENDS_OF_SCALARS:
            give(scan.char)
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
        give(char)
        if depth == 0 and not is_quoted:
            yield None
            return
        yield _QUOTED if is_quoted else _UNQUOTED
