"""Structured output: constraints as llguidance reads them, and limits on their cost.  SPEC 4.9.

A router calls `problem_of`, on a thread, to refuse a structure early; a worker calls `grammar_of`
and compiles what it returns within `limits`.

llguidance bounds the cost of a grammar, but not tightly enough for a shared server.  So these are
refused here: intersections of many patterns and remainders of large numbers, whose automata are
exponential; long patterns and nested repetitions, which take seconds and hundreds of megabytes.
"""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from wire.options import Structure
from wire.process.background import in_background
from wire.process.lark import COMMENT, PATTERN, TEXT, TOKEN_OF_MODEL, depth, lengths
from wire.process.schema import DECODER, ESCAPES, encoded, is_joined, objects, settle

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# An intersection of 10 patterns takes 4 ms to compile, one of 14 half a second.
MAX_JOINED_PATTERNS: Final = 8
# Each is compared with each: 32 take 10 ms, 100 a tenth of a second.
MAX_PATTERN_PROPERTIES: Final = 32
# The time to compile a pattern grows with the square of its length: 6000 characters take 0.1 s.
MAX_PATTERN_LENGTH: Final = 4096
# The same of a terminal with all terminals in it: one of this length takes 0.1 s and 35 MB.  Of
# several, the squares of their lengths are added.
MAX_TERMINAL_LENGTH: Final = 8192
# Of repetitions within repetitions, all multiplied: 10^6 take 0.3 s and 90 MB.
MAX_REPETITIONS: Final = 20_000
# Of %json in a grammar.
MAX_SCHEMAS: Final = 512
# llguidance recurses into references, rules and brackets, and a stack overflow ends the process;
# this depth takes 4 MB of stack.  Of a grammar: rules, terminals and the brackets nested in each.
# Of a schema: its depth times the number of schemas that it refers to.
MAX_DEPTH: Final = 1000
# llguidance quotes the structure in its messages.
_MAX_SHOWN: Final = 200
_EXCERPT: Final = re.compile(r"\n *\d+ \||<non-verbose/>")
_ESCAPES: Final = "json_allowed_escapes"
# JSON on one line: with free whitespace, a weak model at temperature 1 may write line breaks until
# its limit.  Every option is named: one that is not could be set by the schema (`x-guidance`).
_JSON: Final[Any] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,  # a keyword that is not enforced is an error
    _ESCAPES: ESCAPES,
    "json_allow_general_unicode_escapes": False,
}
# Options by which keywords would be left out unsaid.
_LOOSE: Final = ("lenient", "coerce_one_of")
# Where the following text is certain, llguidance would force its own tokens for it, which takes
# three times as long as all else.  This comes last, because messages name lines.
_UNFORCED: Final = '%llguidance {"no_forcing": true}'
# Tokens of a grammar among which a %json is found, and tokens of a pattern with its repetitions.
_LITERAL: Final = re.compile(rf"{COMMENT}|{TOKEN_OF_MODEL}|{TEXT}|{PATTERN}|%(?P<json>json\s*)")
_PART: Final = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]?|(?P<open>\()|(?P<close>\))|(?P<count>\{\d{0,9}(?:,\d{0,9})?\})"
    r"|[*+?]|.",
    re.DOTALL,
)
_DIGITS: Final = re.compile(r"\d+")


class StructureError(ValueError):
    """No answer can be held to this structure; the message says why."""

    def __init__(self, message: str) -> None:
        said = _EXCERPT.split(message.rpartition("JSON schema: ")[2])[0]
        super().__init__(" ".join(said.split())[:_MAX_SHOWN])


def problem_of(structure: Structure) -> str | None:
    """Return why a structure cannot be enforced, or None.  Takes up to a third of a second."""
    from llguidance import LLMatcher

    try:
        validate = partial(LLMatcher.validate_grammar, grammar_of(structure), limits=limits())
        message = in_background(validate)
    except StructureError as error:
        return str(error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust; it cannot be imported
            raise
        return "llguidance fails to compile it; leave out alternatives that are the same"
    if not message or message.startswith("WARNING"):
        return None
    return str(StructureError(message))


def grammar_of(structure: Structure) -> str:
    """Return the grammar to be compiled.  Raises StructureError."""
    from llguidance import LLMatcher

    match structure.kind:
        case "json_schema":
            schema = read_schema(structure.text)
            _settle(schema)
            lark = f"start: {embedded(schema)}"
        case "regex":
            _check_pattern(structure.text)
            regex = json.loads(LLMatcher.grammar_from_regex(structure.text))
            lark = regex["grammars"][0]["lark_grammar"]
        case "lark":
            lark = _settled(structure.text)
    return LLMatcher.grammar_from_lark(f"{lark}\n{_UNFORCED}")


def embedded(schema: dict[str, Any]) -> str:
    """Return the grammar term of a JSON schema, with the whitespace of other JSON answers.

    Raises:
        StructureError: It cannot be written.
    """
    return _written(schema | {"x-guidance": _JSON})


def limits() -> LLParserLimits:
    """Return limits on the cost of compiling a grammar and of each mask.

    With 128,000 tokens a mask takes 10 ms at most, and 340 us for sensible grammars.  400 optional
    properties need 5000 items.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=5_000,
        max_lexer_states=20_000,
        verbose_errors=False,  # or its messages contain what other requests have generated
    )


def read_schema(text: str) -> dict[str, Any]:
    """Return a JSON schema.  Raises StructureError."""
    try:
        schema = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise StructureError(f"the schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise StructureError("the schema is not a JSON object")
    if "x-guidance" in schema:
        raise StructureError('"x-guidance" is not supported')
    return schema


def _settled(text: str) -> str:
    """Return a grammar with the JSON schemas in it as llguidance is to read them.

    Raises:
        StructureError: It would take too long, or have llguidance recurse too deeply.
    """
    parts, schemas = _parted(text)
    rules = " ".join(parts)
    if depth(rules) > MAX_DEPTH:
        raise StructureError(
            "the grammar is too deep: its rules and terminals, and the brackets nested in each, "
            f"come to over {MAX_DEPTH}"
        )
    for literal in _LITERAL.finditer(rules):
        if literal["pattern"]:
            _check_pattern(literal["pattern"])
    if sum(length**2 for length in lengths(rules)) > MAX_TERMINAL_LENGTH**2:
        raise StructureError(
            "the grammar's terminals are too long when all that they name is written out: over "
            f"{MAX_TERMINAL_LENGTH} parts, or as long together"
        )
    # Brackets around rules are a group that may be missing, no class of characters.
    _check_repetitions(_LITERAL.sub(".", rules).replace("[", "(").replace("]", ")"))
    for schema in schemas:
        _settle(schema)
        if isinstance(schema, dict):
            _settle_guidance(schema)
    written = map(_written, schemas)
    return "".join(map("".join, zip_longest(parts, written, fillvalue="")))


def _written(schema: object) -> str:
    try:
        return f"%json {encoded(schema)}"
    except (ValueError, RecursionError) as error:  # half of a surrogate pair; too deep
        raise StructureError(f"the schema cannot be written: {error}") from None


def _parted(text: str) -> tuple[list[str], list[Any]]:
    """Split a grammar at its JSON schemas; return the rules between, and the schemas."""
    parts: list[str] = []
    schemas: list[Any] = []
    end = position = 0
    while literal := _LITERAL.search(text, position):
        position = literal.end()
        if literal["json"]:
            parts.append(text[end : literal.start()])
            try:
                schema, end = DECODER.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                raise StructureError(f"%json is not followed by JSON: {error}") from None
            position = end
            schemas.append(schema)
            if len(schemas) > MAX_SCHEMAS:
                raise StructureError(f"the grammar has over {MAX_SCHEMAS} JSON schemas")
    return [*parts, text[end:]], schemas


def _settle(schema: object) -> None:
    """Rewrite a schema for llguidance, or refuse it."""
    _check_depth(schema)
    try:
        settle(schema)
    except ValueError as error:
        raise StructureError(str(error)) from None
    _check_cost(schema)


def _settle_guidance(schema: dict[str, Any]) -> None:
    """Settle what a schema says to llguidance itself; only schemas in a grammar may."""
    guidance = [node["x-guidance"] for node in objects(schema) if "x-guidance" in node]
    if any(it.get(name) for it in guidance if isinstance(it, dict) for name in _LOOSE):
        raise StructureError(f'"x-guidance" with {" or ".join(_LOOSE)} is not supported')
    own = schema.setdefault("x-guidance", {})
    if isinstance(own, dict) and isinstance(escapes := own.get(_ESCAPES) or ESCAPES, str):
        own[_ESCAPES] = escapes.replace("u", "")


def _check_cost(schema: object) -> None:
    """Refuse a schema whose automata llguidance would build without any bound.

    Raises:
        StructureError: The message names the keyword and the limit.
    """
    patterns: set[str] = set()
    has_joins = False
    for node in objects(schema):
        patterns |= {str(node[key]) for key in ("pattern", "format") if key in node}
        names = node.get("patternProperties")
        if isinstance(names, dict):
            patterns |= names.keys()
            if len(names) > MAX_PATTERN_PROPERTIES:
                raise StructureError(f"over {MAX_PATTERN_PROPERTIES} patternProperties")
        has_joins |= is_joined(node)
    for pattern in patterns:
        _check_pattern(pattern)
    if has_joins and len(patterns) > MAX_JOINED_PATTERNS:
        raise StructureError(
            f"there are {len(patterns)} different patterns and formats; where schemas are combined "
            f"(allOf, or anyOf, oneOf, $ref beside other keywords) at most {MAX_JOINED_PATTERNS}"
        )


def _check_depth(schema: object) -> None:
    """Refuse a schema that llguidance, which recurses, might follow to the end of a stack."""
    references, depth, level = set[str](), 0, [schema]
    while level:
        depth += 1
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
                references.add(str(value.get("$ref")))
            elif isinstance(value, list):
                inner += value
        level = inner
    if depth * len(references) > MAX_DEPTH:
        raise StructureError(
            f"it is nested {depth} deep and refers to {len(references)} schemas; the product is "
            f"over {MAX_DEPTH}"
        )


def _check_pattern(pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise StructureError(f"a pattern has {len(pattern)} characters, over {MAX_PATTERN_LENGTH}")
    _check_repetitions(pattern)


def _check_repetitions(pattern: str) -> None:
    """Refuse a pattern, or the rules of a grammar, whose nested counts multiply to too many."""
    most, last = [1], 1  # in each group that is open, and of what a count would repeat
    for token in _PART.finditer(pattern):
        if token["open"]:
            most.append(1)
        elif token["close"] and len(most) > 1:
            last = most.pop()
        elif token["count"]:
            last *= max(map(int, _DIGITS.findall(token["count"])), default=1)
        else:
            last = 1
        most[-1] = max(most[-1], last)
        if last > MAX_REPETITIONS:
            raise StructureError(f"repetitions within repetitions come to over {MAX_REPETITIONS}")
