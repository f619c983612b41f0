"""Parsers and grammars for the tool calls and reasoning in a model's output.

The syntax is detected from the chat template, or set by the operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from router.text import reasoning
from router.text.output_parts import PlainReader, Reader
from router.text.reasoning import Marks, read_reasoning
from router.text.scan import AnswerReader, Scan, Steps
from router.text.tokenizer import Tokenizer
from router.text.tools import families
from router.text.tools.families import Family
from router.text.tools.lark import AllowedCalls, Tool, literal, upto

AUTO: Final = "auto"
NONE: Final = "none"
TOOL_CALL_PARSERS: Final = (AUTO, NONE, *families.FAMILIES)
REASONING_PARSERS: Final = (AUTO, NONE, *reasoning.FAMILIES)

T = TypeVar("T")


class AnswerSyntax:
    """The syntax of a model's output; shared by all requests."""

    def __init__(
        self,
        template: str,
        tokenizer: Tokenizer,
        *,
        tool_calls: str = AUTO,
        reasoning_marks: str = AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        self._family: Family | None = _chosen(
            tool_calls, families.FAMILIES, families.detect(template)
        )
        self._marks: Marks | None = _chosen(
            reasoning_marks, reasoning.FAMILIES, reasoning.detect(template)
        )

    @property
    def has_calls(self) -> bool:
        return self._family is not None

    @property
    def has_reasoning(self) -> bool:
        return self._marks is not None

    def has_open_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer begins inside reasoning; `continued` is the message it continues."""
        return self._marks is not None and self._marks.left_open(prompt, continued)

    def shown(self, *, has_tools: bool) -> frozenset[int]:
        """Return the special tokens whose text `reader` needs."""
        return frozenset(self._tokenizer.added_tokens(self._marks_of(has_tools)).values())

    def reader(
        self, *, is_reasoning: bool, has_tools: bool, max_calls: int | None = None
    ) -> Reader:
        """Return a parser for one answer; `is_reasoning`: the answer begins inside reasoning."""
        family, marks = self._family if has_tools else None, self._marks
        if family is None and marks is None:
            return PlainReader()

        def read(scan: Scan) -> Steps[None]:
            if marks is not None:
                yield from read_reasoning(scan, marks, is_open=is_reasoning)
            yield from family.read(scan) if family is not None else scan.until()

        return AnswerReader(read, max_calls)

    def call_rules(
        self, tools: Sequence[Tool], *, is_required: bool = True, is_several: bool = True
    ) -> str:
        """Return the grammar rule `answer`, and the rules it uses, for answers that call `tools`.

        If `is_required` is False, the answer may also be content, but any calls must match `tools`.

        Raises:
            WireError: INVALID_REQUEST; the model's syntax cannot express such calls.
        """
        assert self._family is not None, "callers refuse tools unless it `has_calls`"
        return self._family.grammar(AllowedCalls(tools, self._mark, is_several, is_required))

    def grammar(self, rules: str, *, is_reasoning: bool) -> str:
        """Return a Lark grammar: reasoning, if the model has any, then the rule `answer`."""
        marks, start = self._marks, "answer"
        if marks is not None:
            rules += "\n" + upto(self._mark(marks.close), "thought")
            if is_reasoning:
                start = "thought LAYOUT answer"
            else:
                start = f"({self._mark(marks.open)} thought LAYOUT)? answer"
        return f"start: {start}\nTEXT: /(.|\\n)*/\nLAYOUT: /\\n{{0,2}}/\n{rules}\n"

    def _marks_of(self, has_tools: bool) -> list[str]:
        """Return the marks that the reader searches for."""
        of_calls = self._family.MARKS if has_tools and self._family is not None else ()
        return [*of_calls, *((self._marks.open, self._marks.close) if self._marks else ())]

    def _mark(self, text: str) -> str:
        """Return a mark as it is written in a grammar: as a token if it is one."""
        token_id = self._tokenizer.added_tokens([text]).get(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"


def _chosen(name: str, known: Mapping[str, T], detected: T | None) -> T | None:
    return detected if name == AUTO else None if name == NONE else known[name]
