"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as often as needed.

A `</tool_call>` that closes no call is content; one that is missing is not missed.
"""

from __future__ import annotations

from typing import Final

from router.text.scan import Scan, Steps
from router.text.tools.json_call import json_call
from router.text.tools.lark import Wanted, marked, repeated

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MARKS: Final = (OPEN, CLOSE)


def read(scan: Scan) -> Steps[None]:
    is_open = False
    while mark := (yield from scan.until(OPEN, CLOSE)):
        if mark == OPEN:
            yield from scan.space()
            # Outside strings, JSON has no "<": it is the end of a call that lacks a brace.
            is_open = yield from json_call(scan, breaks="<")
        elif is_open:
            scan.drop()
            is_open = False


def grammar(wanted: Wanted) -> str:
    calls = repeated("call", "\n", wanted.is_several)
    rest = rf'"\n" object "\n" {wanted.mark(CLOSE)}'
    return marked(wanted, OPEN, calls, rest, is_several=wanted.is_several)


def speaks(template: str) -> bool:
    """Whether a chat template is of this family: others have `<tool_call>` without JSON in it."""
    return OPEN in template and "<function=" not in template and "<arg_key>" not in template
