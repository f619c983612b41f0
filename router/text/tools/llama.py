"""Llama 3 and 4, JSON: `{"name": …, "parameters": {…}}`, several separated by `;`.

Calls begin the answer, or follow one of the marks that Llama has for code.  A call that stands
elsewhere is content, and so is an object without `parameters`: an answer in JSON may have a name.
"""

from __future__ import annotations

from typing import Final

from router.text.scan import Scan, Steps
from router.text.tools.json_call import json_call
from router.text.tools.lark import Wanted, objects, repeated

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


def grammar(wanted: Wanted) -> str:
    calls = repeated("object", "; ", wanted.is_several)
    return "\n".join(
        [
            f"answer: {wanted.mark(MARKS[0])}? {calls}{'' if wanted.is_required else ' | OTHER'}",
            r"OTHER: /\s*([^\s{](.|\n)*)?/",
            objects(wanted.tools, "parameters"),
        ]
    )


def matches(template: str) -> bool:
    return '"parameters": ' in template and any(
        mark in template for mark in (MARKS[0], "<|start_header_id|>", "<|header_start|>")
    )
