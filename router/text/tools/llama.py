"""Llama 3 and 4 with JSON: `{"name": …, "parameters": {…}}`, several separated by `;`.

Calls are at the beginning of the answer or after one of Llama's marks for code.  A call anywhere
else is content.  So is an object without `parameters`, since a JSON answer may have a "name".
"""

from __future__ import annotations

from typing import Final

from router.text.scan import Scan, Steps
from router.text.tools.json_call import json_call
from router.text.tools.lark import AllowedCalls, objects, repeated

MARKS: Final = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")


def read(scan: Scan) -> Steps[None]:
    if scan.is_blank:
        yield from _calls(scan)
    while mark := (yield from scan.until(*MARKS)):
        if mark == "<|python_end|>" and scan.is_after_call:
            scan.drop()
        yield from _calls(scan)


def _calls(scan: Scan) -> Steps[None]:
    yield from scan.space()
    while (yield from json_call(scan, needs_arguments=True)):
        yield from scan.space()
        yield from scan.literal(";")
        yield from scan.space()


def grammar(allowed: AllowedCalls) -> str:
    calls = repeated("object", "; ", allowed.is_several)
    return "\n".join(
        [
            f"answer: {allowed.mark(MARKS[0])}? {calls}{'' if allowed.is_required else ' | OTHER'}",
            r"OTHER: /\s*([^\s{](.|\n)*)?/",
            objects(allowed.tools, "parameters"),
        ]
    )


def matches(template: str) -> bool:
    return '"parameters": ' in template and any(
        mark in template for mark in (MARKS[0], "<|start_header_id|>", "<|header_start|>")
    )
