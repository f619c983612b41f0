"""Structured output: constraints on an answer's text, from the fields of OpenAI and vLLM.

`response_format` is OpenAI's field, `structured_outputs` is vLLM's, and the `guided_…` fields are
vLLM's older ones.  Each becomes a structure of SPEC 4.9.  A request may have only one structure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from json import dumps
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct

from router.api.errors import invalid
from router.text.tools import lark
from wire.options import MAX_STRUCTURE_LENGTH, Structure
from wire.process.structured_output import problem_of

ANY_OBJECT: Final = '{"type": "object"}'
FORMATS: Final = ("text", "json_object", "json_schema")
# Matches a line that only a grammar in Lark's syntax has, not one in llama.cpp's EBNF.
_LARK: Final = re.compile(r"\s*(start\s*:|%llguidance)")


def is_given(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


class JsonSchema(Struct):
    """`json_schema` of a response format; the schema is enforced even if `strict` is false."""

    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`: OpenAI's field."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct):
    """`structured_outputs`: vLLM's field.  Exactly one of the first five fields must be set."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    # Unsupported fields, refused unless they are null or false.
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class Wanted(NamedTuple):
    """A requested structure, not yet validated; `param` is the field that contains it."""

    param: str
    kind: Literal["json_schema", "regex", "lark", "ebnf"]
    text: str
    # The tools whose parameters are part of the structure.
    tools: Sequence[lark.Tool] = ()

    def to_structure(self) -> Structure:
        """Validate it and return the structure for workers.  Takes up to 0.3 s: use a thread."""
        structure = _lark(self) if self.kind == "ebnf" else Structure(self.kind, self.text)
        if (reason := problem_of(structure)) is not None:
            for tool in self.tools:
                parameters = Structure("lark", f"start: {lark.schema(tool.parameters)}")
                if (problem := problem_of(parameters)) is not None:
                    raise invalid("tools", f"the parameters of {tool.name!r}: {problem}")
            raise invalid(self.param, reason)
        return structure


def wanted_of_format(sent: ResponseFormat | None) -> Iterator[Wanted]:
    """Yield the structure that `response_format` requests, if any."""
    if sent is None or sent.type == "text":
        return
    if sent.type not in FORMATS:
        expected = f"expected one of {', '.join(FORMATS)}, not {sent.type[:40]!r}"
        raise invalid("response_format.type", expected)
    if sent.type == "json_object":
        yield Wanted("response_format", "json_schema", ANY_OBJECT)
        return
    place = "response_format.json_schema"
    if sent.json_schema is None or not is_given(sent.json_schema.schema):
        raise invalid(f"{place}.schema", "is missing")
    yield wanted_schema(f"{place}.schema", sent.json_schema.schema)


def wanted_of_structured(sent: StructuredOutputs | None) -> Iterator[Wanted]:
    """Yield the structures that `structured_outputs` requests."""
    if sent is None:
        return
    for name in sent.__struct_fields__[5:]:
        if getattr(sent, name):
            raise invalid(f"structured_outputs.{name}", "is not supported by this server")
    found = list(
        wanted_of_guided("structured_outputs.", sent.json, sent.regex, sent.choice, sent.grammar)
    )
    if sent.json_object:
        found.append(Wanted("structured_outputs.json_object", "json_schema", ANY_OBJECT))
    if not found:
        raise invalid("structured_outputs", "needs json, regex, choice, grammar or json_object")
    yield from found


def wanted_of_guided(
    prefix: str,
    json: msgspec.Raw,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[Wanted]:
    """Yield the structures that vLLM's four fields request, in either of two spellings.

    `prefix` and a parameter's name make the field's name, such as `guided_json` or
    `structured_outputs.json`; errors have it.
    """
    if is_given(json):
        yield wanted_schema(f"{prefix}json", json)
    if regex is not None:
        yield _short(f"{prefix}regex", "regex", regex)
    if choice is not None:
        if not choice:
            raise invalid(f"{prefix}choice", "is empty")
        texts = map(dumps, choice)  # Lark has the string syntax of JSON
        yield _short(f"{prefix}choice", "lark", f"start: {' | '.join(texts)}")
    if grammar is not None:
        is_lark = any(_LARK.match(line) for line in grammar.splitlines())
        yield _short(f"{prefix}grammar", "lark" if is_lark else "ebnf", grammar)


def one_of(found: list[Wanted]) -> Wanted | None:
    """Return the only structure of a request, or None; refuse a second one."""
    if len(found) > 1:
        raise invalid(found[1].param, f"an answer is held to one structure; leave {found[0].param}")
    return found[0] if found else None


def wanted_schema(param: str, raw: msgspec.Raw) -> Wanted:
    """Return the structure of a JSON schema in field `param`."""
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError:
        raise invalid(param, "is not UTF-8") from None
    if text.startswith('"'):  # vLLM also accepts a schema as a string
        text = msgspec.json.decode(text).strip()
    if not text.startswith("{"):
        raise invalid(param, "expected a JSON schema, an object")
    return _short(param, "json_schema", text)


def _short(param: str, kind: Literal["json_schema", "regex", "lark", "ebnf"], text: str) -> Wanted:
    if not 1 <= len(text) <= MAX_STRUCTURE_LENGTH:
        raise invalid(param, f"has {len(text)} characters, not 1 to {MAX_STRUCTURE_LENGTH}")
    return Wanted(param, kind, text)


def _lark(wanted: Wanted) -> Structure:
    from llguidance.gbnf_to_lark import gbnf_to_lark  # rarely needed

    try:
        text = gbnf_to_lark(wanted.text)
    except Exception as error:  # the library raises bare Exceptions
        raise invalid(wanted.param, f"is no grammar in EBNF or Lark: {str(error)[:200]}") from error
    if len(text) > MAX_STRUCTURE_LENGTH:
        raise invalid(wanted.param, f"is over {MAX_STRUCTURE_LENGTH} characters in Lark's syntax")
    return Structure("lark", text)
