"""Constraints on the answer to a conversation: tool calls, a format, and reasoning before them.

A structure constrains the output from its first token.  So if the model generates reasoning first,
the reasoning and the structure of the answer are combined into one grammar.
"""

from __future__ import annotations

import re
from typing import Final

from router.api.errors import invalid
from router.api.requests.conversation import Conversation, Tool
from router.api.requests.structures import Wanted
from router.text.output_parser import AnswerSyntax
from router.text.tools import lark
from wire.options import MAX_STRUCTURE_LENGTH
from wire.process.structured_output import StructureError, embedded, read_schema

_ANY_OBJECT: Final = {"type": "object"}
# Finds slashes in a regular expression: Lark needs them escaped.
_SLASH: Final = re.compile(r"(?P<escape>\\.)|/", re.DOTALL)
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def constraint(
    syntax: AnswerSyntax, conversation: Conversation, wanted: Wanted | None, *, is_reasoning: bool
) -> Wanted | None:
    """Return the structure that constrains the answer, if any.

    `wanted` is the format that the body requests.  Required tool calls override it, because such an
    answer has no content.
    """
    choice, is_several = conversation.tool_choice, conversation.has_parallel_calls
    tools = conversation.callable_tools
    if choice.mode in ("required", "named"):
        is_several = is_several and choice.mode == "required"
        known = [_forced(tool) for tool in tools]
        rules = syntax.call_rules(known, is_several=is_several)
        wanted = _grammar("tool_choice", syntax, rules, is_reasoning=is_reasoning)
        return wanted._replace(tools=known)
    if wanted is not None:
        return _format(syntax, tools, wanted, is_several=is_several, is_reasoning=is_reasoning)
    if tools != conversation.visible_tools or any(tool.is_strict for tool in tools):
        known = [_forced(tool) if tool.is_strict else _loose(tool) for tool in tools]
        rules = syntax.call_rules(known, is_required=False, is_several=is_several)
        wanted = _grammar("tools", syntax, rules, is_reasoning=is_reasoning)
        return wanted._replace(tools=known)
    return None


def _format(
    syntax: AnswerSyntax,
    tools: tuple[Tool, ...],
    wanted: Wanted,
    *,
    is_several: bool,
    is_reasoning: bool,
) -> Wanted:
    """Extend a format to allow reasoning before it, and tool calls instead of it."""
    is_alone = not tools and not syntax.has_reasoning
    if is_alone or wanted.kind not in ("json_schema", "regex"):
        return wanted
    if wanted.kind == "json_schema":
        try:
            rules = f"formatted: {embedded(read_schema(wanted.text))}"
        except StructureError as error:
            raise invalid(wanted.param, str(error)) from None
    else:
        escaped = _SLASH.sub(lambda match: match["escape"] or r"\/", wanted.text)
        rules = f"formatted: /{escaped}/"
    if tools:
        calls = syntax.call_rules([_loose(tool) for tool in tools], is_several=is_several)
        called = re.sub(r"^answer:", "called:", calls, count=1, flags=re.MULTILINE)
        rules = f"answer: called | formatted\n{called}\n{rules}"
    else:
        rules = f"answer: formatted\n{rules}"
    return _grammar(wanted.param, syntax, rules, is_reasoning=is_reasoning)


def _grammar(param: str, syntax: AnswerSyntax, rules: str, *, is_reasoning: bool) -> Wanted:
    text = syntax.grammar(rules, is_reasoning=is_reasoning)
    if len(text) > MAX_STRUCTURE_LENGTH:
        raise invalid(
            param, f"needs a grammar of {len(text)} characters, over {MAX_STRUCTURE_LENGTH}"
        )
    return Wanted(param, "lark", text)


def _forced(tool: Tool) -> lark.Tool:
    return lark.Tool(tool.name, _NO_ARGUMENTS if tool.parameters is None else tool.parameters)


def _loose(tool: Tool) -> lark.Tool:
    return lark.Tool(tool.name, _ANY_OBJECT)
