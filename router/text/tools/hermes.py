"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once per call.

A `</tool_call>` without a call before it is content; a missing one is tolerated.
"""

from __future__ import annotations

from typing import Final

from router.text.scan import Scan, Steps
from router.text.tools.json_call import json_call
from router.text.tools.lark import AllowedCalls, marked, repeated

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MARKS: Final = (OPEN, CLOSE)


def read(scan: Scan) -> Steps[None]:
    is_open = False
    while mark := (yield from scan.until(OPEN, CLOSE)):
        if mark == OPEN:
            yield from scan.space()
            # Outside strings, JSON has no "<": it ends a call whose closing brace is missing.
            is_open = yield from json_call(scan, breaks="<")
        elif is_open:
            scan.drop()
            is_open = False


def grammar(allowed: AllowedCalls) -> str:
    calls = repeated("call", "\n", allowed.is_several)
    rest = rf'"\n" object "\n" {allowed.mark(CLOSE)}'
    return marked(allowed, OPEN, calls, rest, is_several=allowed.is_several)


def matches(template: str) -> bool:
    """Whether a chat template uses this syntax: other families have no JSON in `<tool_call>`."""
    return OPEN in template and "<function=" not in template and "<arg_key>" not in template
