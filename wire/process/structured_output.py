"""Structured output: convert constraints to llguidance grammars and limit their cost.  SPEC 4.9.

A router calls `problem_of` on a thread, to reject an invalid structure early.  A worker calls
`grammar_of` and compiles the grammar within `limits`.

llguidance limits the cost of a grammar, but not tightly enough for a shared server.  So this module
also rejects intersections of many patterns and large `multipleOf` values, whose automata grow
exponentially, and long patterns and nested repetitions, which need seconds and hundreds of MB.
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
from wire.process.schema import DECODER, ESCAPES, encoded, is_joined, normalize, objects

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# An intersection of 10 patterns takes 4 ms to compile, one of 14 half a second.
MAX_JOINED_PATTERNS: Final = 8
# All pairs are compared: 32 take 10 ms, 100 a tenth of a second.
MAX_PATTERN_PROPERTIES: Final = 32
# The time to compile a pattern grows with the square of its length: 6000 characters take 0.1 s.
MAX_PATTERN_LENGTH: Final = 4096
# The same for an expanded terminal: one of this length takes 0.1 s and 35 MB.  For several
# terminals, the squares of their lengths are added.
MAX_TERMINAL_LENGTH: Final = 8192
# Limit for the product of nested repetition counts: 10^6 take 0.3 s and 90 MB.
MAX_REPETITIONS: Final = 20_000
# Limit for the number of %json in a grammar.
MAX_SCHEMAS: Final = 512
# llguidance recurses into references, rules and brackets, and a stack overflow ends the process;
# this depth needs 4 MB of stack.  The depth of a grammar is the number of rules and terminals plus
# the brackets nested in each; that of a schema is its nesting depth times the number of schemas
# that it refers to.
MAX_DEPTH: Final = 1000
# llguidance quotes the structure in its messages.
_MAX_SHOWN: Final = 200
_EXCERPT: Final = re.compile(r"\n *\d+ \||<non-verbose/>")
_ESCAPES: Final = "json_allowed_escapes"
# JSON on one line: with free whitespace, a weak model at temperature 1 may generate line breaks
# until its limit.  All options are set here, because a schema could set the others (`x-guidance`).
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
# Options with which llguidance would silently ignore keywords.
_LOOSE: Final = ("lenient", "coerce_one_of")
# Disables forced tokens: where only one text can follow, llguidance would tokenize it itself, which
# takes three times as long as everything else.  It is appended to the grammar, so that line numbers
# in messages stay right.
_UNFORCED: Final = '%llguidance {"no_forcing": true}'
# Tokens of a grammar, to find %json; and tokens of a pattern, to find its repetitions.
_LITERAL: Final = re.compile(rf"{COMMENT}|{TOKEN_OF_MODEL}|{TEXT}|{PATTERN}|%(?P<json>json\s*)")
_PART: Final = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]?|(?P<open>\()|(?P<close>\))|(?P<count>\{\d{0,9}(?:,\d{0,9})?\})"
    r"|[*+?]|.",
    re.DOTALL,
)
_DIGITS: Final = re.compile(r"\d+")


class StructureError(ValueError):
    """A structure cannot be enforced; the message has the reason."""

    def __init__(self, message: str) -> None:
        reason = _EXCERPT.split(message.rpartition("JSON schema: ")[2])[0]
        super().__init__(" ".join(reason.split())[:_MAX_SHOWN])


def problem_of(structure: Structure) -> str | None:
    """Return why a structure cannot be enforced, or None.  This takes up to a third of a second."""
    from llguidance import LLMatcher

    try:
        validate = partial(LLMatcher.validate_grammar, grammar_of(structure), limits=limits())
        message = in_background(validate)
    except StructureError as error:
        return str(error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic; the class cannot be imported
            raise
        return "llguidance fails to compile it; leave out alternatives that are the same"
    if not message or message.startswith("WARNING"):
        return None
    return str(StructureError(message))


def grammar_of(structure: Structure) -> str:
    """Convert a structure to a grammar for llguidance.  Raises StructureError."""
    from llguidance import LLMatcher

    match structure.kind:
        case "json_schema":
            schema = read_schema(structure.text)
            _normalize(schema)
            lark = f"start: {embedded(schema)}"
        case "regex":
            _check_pattern(structure.text)
            regex = json.loads(LLMatcher.grammar_from_regex(structure.text))
            lark = regex["grammars"][0]["lark_grammar"]
        case "lark":
            lark = _normalized(structure.text)
    return LLMatcher.grammar_from_lark(f"{lark}\n{_UNFORCED}")


def embedded(schema: dict[str, Any]) -> str:
    """Return a grammar term for a JSON schema, with the same whitespace as other JSON answers.

    Raises:
        StructureError: The schema cannot be encoded.
    """
    return _json_term(schema | {"x-guidance": _JSON})


def limits() -> LLParserLimits:
    """Return llguidance's limits for compiling a grammar and for computing a token mask.

    For a vocabulary of 128,000 tokens, a mask then takes at most 10 ms, and 340 us for typical
    grammars.  400 optional properties need 5000 items.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=5_000,
        max_lexer_states=20_000,
        verbose_errors=False,  # otherwise messages contain text generated for other requests
    )


def read_schema(text: str) -> dict[str, Any]:
    """Parse a JSON schema.  Raises StructureError."""
    try:
        schema = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise StructureError(f"the schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise StructureError("the schema is not a JSON object")
    if "x-guidance" in schema:
        raise StructureError('"x-guidance" is not supported')
    return schema


def _normalized(text: str) -> str:
    """Return a Lark grammar in which all JSON schemas are normalized.

    Raises:
        StructureError: The grammar would take too long to compile, or is nested too deeply.
    """
    parts, schemas = _split(text)
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
    # In rules, square brackets are an optional group, not a character class.
    _check_repetitions(_LITERAL.sub(".", rules).replace("[", "(").replace("]", ")"))
    for schema in schemas:
        _normalize(schema)
        if isinstance(schema, dict):
            _normalize_guidance(schema)
    terms = map(_json_term, schemas)
    return "".join(map("".join, zip_longest(parts, terms, fillvalue="")))


def _json_term(schema: object) -> str:
    try:
        return f"%json {encoded(schema)}"
    except (ValueError, RecursionError) as error:  # half a surrogate pair, or nested too deeply
        raise StructureError(f"the schema cannot be written: {error}") from None


def _split(text: str) -> tuple[list[str], list[Any]]:
    """Split a grammar at its JSON schemas; return the text between them, and the schemas."""
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


def _normalize(schema: object) -> None:
    """Normalize a schema in place, or raise StructureError."""
    _check_depth(schema)
    try:
        normalize(schema)
    except ValueError as error:
        raise StructureError(str(error)) from None
    _check_cost(schema)


def _normalize_guidance(schema: dict[str, Any]) -> None:
    """Normalize `x-guidance`, options for llguidance that only schemas in a grammar may have."""
    guidance = [node["x-guidance"] for node in objects(schema) if "x-guidance" in node]
    if any(each.get(name) for each in guidance if isinstance(each, dict) for name in _LOOSE):
        raise StructureError(f'"x-guidance" with {" or ".join(_LOOSE)} is not supported')
    own = schema.setdefault("x-guidance", {})
    if isinstance(own, dict) and isinstance(escapes := own.get(_ESCAPES) or ESCAPES, str):
        own[_ESCAPES] = escapes.replace("u", "")


def _check_cost(schema: object) -> None:
    """Reject a schema for which llguidance would build automata of unlimited size.

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
    """Reject a schema that might overflow the stack, because llguidance is recursive."""
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
    """Reject a pattern, or a grammar's rules, if the product of nested counts is too large."""
    # The largest product in each open group, and that of the last element, which a count repeats.
    most, last = [1], 1
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
