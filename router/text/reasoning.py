"""Reasoning: the text that a model generates between two marks before its answer.

Reasoning is possible only at the beginning of the output.  It starts with the opening mark, unless
the prompt ends with that, and lasts until the closing mark or the end of the text.  A mark anywhere
else is content.  Whitespace next to the marks is omitted.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from router.text.scan import Scan, Steps


class Marks(NamedTuple):
    """The marks around the reasoning of a family of models."""

    open: str
    close: str
    # Whether the output begins inside reasoning even without an opening mark.
    is_open_at_once: bool = False

    def left_open(self, prompt: str, continued: str = "") -> bool:
        """Whether the output begins inside reasoning; `continued` is the message it continues."""
        if continued:
            return continued.rfind(self.open) > continued.rfind(self.close)
        prompt = prompt.rstrip()
        if self.is_open_at_once:
            return not prompt.endswith(self.close)
        return prompt.endswith(self.open)


_THINK: Final = Marks("<think>", "</think>")
FAMILIES: Final = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK._replace(is_open_at_once=True),
    "glm45": _THINK,
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


def detect(template: str) -> Marks | None:
    """Return the marks that a chat template contains, if any."""
    return next((marks for marks in FAMILIES.values() if marks.close in template), None)


def read_reasoning(scan: Scan, marks: Marks, *, is_open: bool) -> Steps[None]:
    """Parse reasoning at the beginning of the output; `is_open`: no opening mark is needed."""
    yield from scan.space()
    if (yield from scan.literal(marks.open)):
        scan.drop()
    elif not is_open:
        return
    scan.begin_reasoning()
    if (yield from scan.until(marks.close)):
        scan.end_reasoning()
