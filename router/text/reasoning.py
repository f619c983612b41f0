"""Reasoning: the text that a model writes between two marks before it answers.

Only the beginning of an answer can be reasoning: it opens with the first mark, or the prompt has
opened it already, and goes on to the second mark or the end of the text.  A mark anywhere else is
content.  White space beside the marks is layout and left out.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from router.text.scan import Scan, Steps


class Marks(NamedTuple):
    """The marks around the reasoning of a family of models."""

    open: str
    close: str
    # The answer begins inside, although neither the prompt nor the answer says so.
    is_open_at_once: bool = False

    def left_open(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer to `prompt` begins inside; `continued` is the message it goes on."""
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
    """Return the marks that a chat template speaks of."""
    return next((marks for marks in FAMILIES.values() if marks.close in template), None)


def read_reasoning(scan: Scan, marks: Marks, *, is_open: bool) -> Steps[None]:
    """Read reasoning if the answer begins with it; `is_open`: it begins inside."""
    yield from scan.space()
    if (yield from scan.literal(marks.open)):
        scan.drop()
    elif not is_open:
        return
    scan.begin_reasoning()
    if (yield from scan.until(marks.close)):
        scan.end_reasoning()
