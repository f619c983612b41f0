"""Scans an answer by character, holding back text that may become a tool call.

A parser is a generator over a `Scan`: `scan.char` is the character it stands at ("" is the end of
the text), and a `yield` moves on to the next.  So it cannot depend on how the text was cut.  Where
it yields a pattern, `scan.char` may next be a run of characters that matches.

The rules that all families of tool calls share are here:

- What may be a call is held.  It is one when its name is complete and its arguments have begun:
  then `begin` gives it, drops what was held, and nothing is taken back any more.  What breaks
  before that is content, up to where it broke, and calls are looked for from there on.
- A call is finished where `end_call` finds that its arguments parse, whatever ended them.
- White space before, between and after calls is layout, not content.  Content on both sides of a
  call is parted by a line break, so that all content together can be read.
- Calls beyond `max_calls` are read and left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

from router.text.output_parts import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reasoning,
    arguments_of,
    joined,
)
from router.text.stops import StopAutomaton, StopMatcher

T = TypeVar("T")
Steps = Generator[re.Pattern[str] | None, None, T]


class Scan:
    """Where the reader stands, what it holds, and the parts it has given."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.char = ""
        self._max_calls = max_calls
        self._num_calls = 0
        # The arguments of the last call.
        self._arguments: list[str] = []
        self._held: list[str] = []
        self._parts: list[Part] = []
        # What text is when it is no call.
        self._kind: type[Content | Reasoning] = Content
        # White space after such text: text too, unless a call or the end of reasoning follows.
        self._space: list[str] = []
        # White space that comes now follows a call or a mark of reasoning.
        self._skips_space = False
        self._has_content = False

    # What is given.

    def begin_reasoning(self) -> None:
        """Text from here on is reasoning."""
        self._kind = Reasoning
        self._skips_space = True

    def end_reasoning(self) -> None:
        """Text from here on is content; what is held was the mark."""
        self.drop()
        self._space.clear()
        self._kind = Content
        self._skips_space = True

    def begin(self, name: str) -> None:
        """A call begins here; what was held was the beginning of it."""
        self.drop()
        self._space.clear()
        self._skips_space = True
        if self._is_wanted(self._num_calls):
            self._parts.append(CallStart(self._num_calls, name))
        self._arguments.clear()
        self._num_calls += 1

    def argue(self, text: str) -> None:
        """Give a further piece of the arguments of the call that began last; drop what is held."""
        self._held.clear()
        if self._is_wanted(self._num_calls - 1):
            self._arguments.append(text)
            self._parts.append(CallArguments(self._num_calls - 1, text))

    def end_call(self) -> None:
        """The arguments of the call that began last end here, or break."""
        if arguments_of("".join(self._arguments)) is not None:
            self._parts.append(CallEnd(self._num_calls - 1))

    def drop(self) -> None:
        """Leave out what is held."""
        self._held.clear()

    @property
    def is_after_call(self) -> bool:
        """Whether nothing but white space came since the last call."""
        return self._skips_space and self._num_calls > 0

    @property
    def is_blank(self) -> bool:
        """Whether nothing but white space is held."""
        return not "".join(self._held).strip()

    def take(self) -> list[Part]:
        """Return the parts given since the last time."""
        parts, self._parts = self._parts, []
        return joined(parts)

    # What is read.

    def keep(self, char: str) -> None:
        """Hold `char`; the caller moves on."""
        self._held.append(char)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def held_from(self, begin: int) -> str:
        """Return what is held, from the time on when `num_held` was `begin`."""
        return "".join(self._held[begin:])

    def space(self) -> Steps[None]:
        """Hold white space, as much as there is."""
        while self.char.isspace():
            self._held.append(self.char)
            yield None

    def literal(self, text: str) -> Steps[bool]:
        """Hold `text`, or as much of it as there is: False where it is another."""
        for char in text:
            if self.char != char:
                return False
            self._held.append(char)
            yield None
        return True

    def word(self, is_of_word: Callable[[str], bool]) -> Steps[str]:
        """Hold characters as long as they belong to a word, and return them."""
        begin = len(self._held)
        while self.char and is_of_word(self.char):
            self._held.append(self.char)
            yield None
        return self.held_from(begin)

    def name(self) -> Steps[str]:
        """Hold the name of a function or of an argument, and return it."""
        return self.word(lambda char: char.isalnum() or char in "_-.")

    def listed(self, read: Callable[[Scan], Steps[bool]]) -> Steps[None]:
        """Read a list in brackets, each entry with `read`; it ends where that says it breaks."""
        yield from self.space()
        separator = "["
        while (yield from self.literal(separator)):
            yield from self.space()
            if not (yield from read(self)):
                return
            yield from self.space()
            separator = ","
        if (yield from self.literal("]")):
            self.drop()

    def until(self, *marks: str) -> Steps[str]:
        """Give content up to one of `marks`; hold and return that, or "" at the end of the text.

        What is held from before is content: a call that broke.  Its end may begin a mark.
        """
        if not self.char:
            return ""
        automaton, plain = _watch(marks)
        matcher = StopMatcher(automaton)
        broken, self._held = "".join(self._held), []
        begun = max(
            (n for mark in marks for n in range(len(mark)) if broken.endswith(mark[:n])), default=0
        )
        self._say(broken[: len(broken) - begun])
        matcher.feed(broken[len(broken) - begun :])
        while self.char:
            if matcher.is_holding or not plain.match(self.char):
                self._say(matcher.feed(self.char))
            else:
                self._say(self.char)
            if matcher.stop is not None:
                self._held.append(matcher.stop)
                yield None
                return matcher.stop
            yield None if matcher.is_holding else plain
        self._held.append(matcher.flush())
        return ""

    def _say(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
            if text and self._has_content:
                self._space.append("\n")
        if not text:
            return
        self._skips_space = False
        said = text.rstrip()
        if said:
            self._parts.append(self._kind("".join([*self._space, said])))
            self._space.clear()
            self._has_content = self._kind is Content
        self._space.append(text[len(said) :])

    def _is_wanted(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls

    def end(self) -> None:
        """The text has ended: what is held is content, or the unfinished rest of a call."""
        if not self.is_after_call:
            self._say("".join(self._held))
        if self._space:
            self._parts.append(self._kind("".join(self._space)))


@cache
def _watch(marks: tuple[str, ...]) -> tuple[StopAutomaton, re.Pattern[str]]:
    """Finds `marks`, and knows characters with which none begins."""
    begins = "".join(re.escape(mark[0]) for mark in marks)
    plain = f"[^{begins}]+" if marks else "(?s:.+)"
    return StopAutomaton(marks), re.compile(plain)


class AnswerReader:
    """Reads an answer with a generator."""

    def __init__(self, read: Callable[[Scan], Steps[None]], max_calls: int | None = None) -> None:
        self._scan = Scan(max_calls)
        self._steps = read(self._scan)
        self._run: re.Pattern[str] | None = None

    def feed(self, text: str) -> list[Part]:
        position = 0
        while position < len(text):
            run = self._run.match(text, position) if self._run is not None else None
            self._scan.char = text[position] if run is None else run[0]
            position += len(self._scan.char)
            self._run = next(self._steps)
        return self._scan.take()

    def flush(self) -> list[Part]:
        self._scan.char = ""
        for _ in self._steps:
            raise AssertionError("a generator waits for a character after the last")
        self._scan.end()
        return self._scan.take()
