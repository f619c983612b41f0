"""Scans the output of a model by character, buffering text that may become a tool call.

A parser is a generator over a `Scan`: `scan.char` is the current character ("" at the end of the
text), and a `yield` advances to the next.  So the result cannot depend on how the text is split.
If the generator yields a pattern, the next `scan.char` may be several characters that match it.

The rules for all families of tool calls are here:

- Text that may be a call is buffered.  It becomes a call when its name is complete and its
  arguments have begun: then `begin` emits a `CallStart` and drops the buffer.  If the syntax is
  violated before that, the text so far is content, and the search for calls continues after it.
- A call is finished if its arguments parse (`end_call`), no matter what ended them.
- Whitespace before, between and after calls is omitted.  Content before and after a call is
  separated by a line break.
- Calls beyond `max_calls` are parsed and omitted.
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
    """The current character, the buffered text, and the emitted parts of one answer."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.char = ""
        self._max_calls = max_calls
        self._num_calls = 0
        # The arguments of the current call.
        self._arguments: list[str] = []
        self._buffer: list[str] = []
        self._parts: list[Part] = []
        # The kind of text outside calls.
        self._kind: type[Content | Reasoning] = Content
        # Whitespace after that text, omitted if a call or the end of reasoning follows.
        self._space: list[str] = []
        # Whether to omit whitespace here, after a call or a mark of reasoning.
        self._skips_space = False
        self._has_content = False

    # Output.

    def begin_reasoning(self) -> None:
        """Emit the following text as reasoning."""
        self._kind = Reasoning
        self._skips_space = True

    def end_reasoning(self) -> None:
        """Drop the buffered mark, and emit the following text as content."""
        self.drop()
        self._space.clear()
        self._kind = Content
        self._skips_space = True

    def begin(self, name: str) -> None:
        """Emit the start of a call, and drop the buffer, which has its beginning."""
        self.drop()
        self._space.clear()
        self._skips_space = True
        if self._is_wanted(self._num_calls):
            self._parts.append(CallStart(self._num_calls, name))
        self._arguments.clear()
        self._num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Emit more arguments of the current call, and drop the buffer."""
        self._buffer.clear()
        if self._is_wanted(self._num_calls - 1):
            self._arguments.append(text)
            self._parts.append(CallArguments(self._num_calls - 1, text))

    def end_call(self) -> None:
        """Emit the end of the current call if its arguments are valid."""
        if arguments_of("".join(self._arguments)) is not None:
            self._parts.append(CallEnd(self._num_calls - 1))

    def drop(self) -> None:
        self._buffer.clear()

    @property
    def is_after_call(self) -> bool:
        """Whether only whitespace has followed the last call."""
        return self._skips_space and self._num_calls > 0

    @property
    def is_blank(self) -> bool:
        """Whether the buffer has only whitespace."""
        return not "".join(self._buffer).strip()

    def take(self) -> list[Part]:
        """Return the parts emitted since the last call of `take`."""
        parts, self._parts = self._parts, []
        return joined(parts)

    # Input.

    def buffer(self, char: str) -> None:
        """Buffer `char`; the caller advances."""
        self._buffer.append(char)

    @property
    def num_buffered(self) -> int:
        return len(self._buffer)

    def buffered_from(self, begin: int) -> str:
        """Return the buffered text since `num_buffered` was `begin`."""
        return "".join(self._buffer[begin:])

    def space(self) -> Steps[None]:
        """Buffer all whitespace that follows."""
        while self.char.isspace():
            self._buffer.append(self.char)
            yield None

    def literal(self, text: str) -> Steps[bool]:
        """Buffer `text`; return False at the first character that differs."""
        for char in text:
            if self.char != char:
                return False
            self._buffer.append(char)
            yield None
        return True

    def word(self, is_word_char: Callable[[str], bool]) -> Steps[str]:
        """Buffer and return the characters that belong to a word."""
        begin = len(self._buffer)
        while self.char and is_word_char(self.char):
            self._buffer.append(self.char)
            yield None
        return self.buffered_from(begin)

    def name(self) -> Steps[str]:
        """Buffer and return the name of a function or argument."""
        return self.word(lambda char: char.isalnum() or char in "_-.")

    def read_list(self, read: Callable[[Scan], Steps[bool]]) -> Steps[None]:
        """Parse a list in brackets, each entry with `read`; stop if that returns False.

        A complete list leaves nothing in the buffer.  What a violation of the syntax leaves there
        becomes content.
        """
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
        """Emit content up to one of `marks`; buffer and return that mark, or "" at the end.

        Text buffered before is content too, as it is not a call; its end may begin a mark.
        """
        if not self.char:
            return ""
        automaton, plain = _watch(marks)
        matcher = StopMatcher(automaton)
        text, self._buffer = "".join(self._buffer), []
        overlap = max(
            (n for mark in marks for n in range(len(mark)) if text.endswith(mark[:n])), default=0
        )
        self._add_text(text[: len(text) - overlap])
        matcher.feed(text[len(text) - overlap :])
        while self.char:
            if matcher.is_holding or not plain.match(self.char):
                self._add_text(matcher.feed(self.char))
            else:
                self._add_text(self.char)
            if matcher.stop is not None:
                self._buffer.append(matcher.stop)
                yield None
                return matcher.stop
            yield None if matcher.is_holding else plain
        self._buffer.append(matcher.flush())
        return ""

    def _add_text(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
            if text and self._has_content:
                self._space.append("\n")
        if not text:
            return
        self._skips_space = False
        stripped = text.rstrip()
        if stripped:
            self._parts.append(self._kind("".join([*self._space, stripped])))
            self._space.clear()
            self._has_content = self._kind is Content
        self._space.append(text[len(stripped) :])

    def _is_wanted(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls

    def end(self) -> None:
        """Emit the buffer as content at the end of the text, unless it is the rest of a call."""
        if not self.is_after_call:
            self._add_text("".join(self._buffer))
        if self._space:
            self._parts.append(self._kind("".join(self._space)))


@cache
def _watch(marks: tuple[str, ...]) -> tuple[StopAutomaton, re.Pattern[str]]:
    """Return an automaton for `marks`, and a pattern of characters that begin none of them."""
    begins = "".join(re.escape(mark[0]) for mark in marks)
    plain = f"[^{begins}]+" if marks else "(?s:.+)"
    return StopAutomaton(marks), re.compile(plain)


class AnswerReader:
    """Parses one answer with a generator."""

    def __init__(self, read: Callable[[Scan], Steps[None]], max_calls: int | None = None) -> None:
        self._scan = Scan(max_calls)
        self._steps = read(self._scan)
        self._pattern: re.Pattern[str] | None = None

    def feed(self, text: str) -> list[Part]:
        position = 0
        while position < len(text):
            match = self._pattern.match(text, position) if self._pattern else None
            self._scan.char = text[position] if match is None else match[0]
            position += len(self._scan.char)
            self._pattern = next(self._steps)
        return self._scan.take()

    def flush(self) -> list[Part]:
        self._scan.char = ""
        for _ in self._steps:
            raise AssertionError("a generator waits for a character after the last")
        self._scan.end()
        return self._scan.take()
