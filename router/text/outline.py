"""Finds the part of a rendered chat that a token is in, without keeping the text.

The end of each message is looked for in the prompt text when it is rendered.  A message whose text
the template changes, and one that has only calls of tools, share a part with the next one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from router.text.tokenizer import Tokenizer

# How many of the last characters of a message are looked for.
TAIL_CHARS: Final = 32
# How often the text may be searched for messages that it does not have.
MAX_SEARCHES: Final = 2
_SYSTEM: Final = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Outline:
    """The parts of one prompt.  Offsets are in characters.

    Attributes:
        ends: Where the parts end; the last one is followed by the generation prompt.
        lasts: The index of the last message in each part.
        start: Where the text of the first message starts; the template's own text is before it.
        tools: Where the tools are described, from and to; equal if there are none.
    """

    tokenizer: Tokenizer
    ends: array[int]
    lasts: array[int]
    start: int
    tools: tuple[int, int]
    has_system: bool
    num_messages: int

    @property
    def num_bytes(self) -> int:
        return self.ends.itemsize * len(self.ends) + self.lasts.itemsize * len(self.lasts)

    def part_after(self, token_ids: Sequence[int]) -> str:
        """Return the part of the token that follows the first tokens `token_ids`."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return self.part_at(len(text))

    def part_at(self, offset: int) -> str:
        """Return the part of a character: ``system``, ``tools``, ``messages[3]``, ….

        The end of a message belongs to it, because a longer message would differ there.
        """
        if self.tools[0] < offset < self.tools[1]:
            return "tools"
        index = bisect_left(self.ends, offset)
        if index == 0 and self.has_system:
            return "system"
        if index == 0 and offset < self.start:
            return "template"
        first = self.lasts[index - 1] + 1 if index else 0
        is_last = index == len(self.ends)
        last = self.num_messages - 1 if is_last else self.lasts[index]
        if first > last:
            return "generation_prompt"
        return f"messages[{first}]" if first == last else f"messages[{first}..{last}]"


def outline(
    tokenizer: Tokenizer, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[str]
) -> Outline:
    """Return the parts of the prompt `text`; `tools` are the names of the tools in it."""
    found = _found(text, messages)
    calls = {index for index, each in enumerate(messages) if each.get("tool_calls")}
    first = messages[0].get("role") if messages else None
    return Outline(
        tokenizer,
        array("I", [end for _, _, end in found]),
        array("I", [index for index, _, _ in found]),
        start=found[0][1] if found else len(text),
        tools=_tools(text, found, tools, calls) if tools else (0, 0),
        has_system=first in _SYSTEM and bool(found) and found[0][0] == 0,
        num_messages=len(messages),
    )


def _found(text: str, messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int]]:
    """Return the index, start and end of each message whose text is found.

    The search goes from the last message to the first: what templates add is shorter between
    messages than before them, so that a short message is rarely found in the wrong place.
    """
    found, limit, to_search = list[tuple[int, int, int]](), len(text), MAX_SEARCHES * len(text)
    for index in range(len(messages) - 1, -1, -1):
        content = messages[index].get("content")
        body = content.strip() if isinstance(content, str) else ""
        tail = body[-TAIL_CHARS:]
        if not tail or to_search < 0:
            continue
        position = text.rfind(tail, 0, limit)
        to_search -= limit - max(position, 0)
        if position >= 0:
            end = position + len(tail)
            is_whole = end >= len(body) and text.startswith(body, end - len(body))
            limit = end - len(body) if is_whole else position
            found.append((index, limit, end))
    return found[::-1]


def _tools(
    text: str, found: Sequence[tuple[int, int, int]], names: Sequence[str], calls: set[int]
) -> tuple[int, int]:
    """Return the first range between messages, without calls, that has all names of tools."""
    before, end_before = -1, 0
    for index, start, end in found:
        has_names = all(text.find(name, end_before, start) >= 0 for name in names)
        if has_names and calls.isdisjoint(range(before + 1, index)):
            return (end_before if before >= 0 else -1), start
        before, end_before = index, end
    return 0, 0
