"""JSON schemas for acceptance: each keyword alone, then random ones that mix them.

What a model draws from them ends soon, for every string, list and number has a bound somewhere;
what may be refused by a server is marked, and everything else must work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

Schema = dict[str, Any]
# Beside these a server may say no, in words; it may never ignore one.
OPTIONAL: Final = {
    *("not", "if", "uniqueItems", "contains", "patternProperties", "propertyNames", "multipleOf"),
    *("dependentRequired", "minProperties", "maxProperties", "unevaluatedProperties", "oneOf"),
    *("dependentSchemas", "format", "allOf"),
}


class Case(NamedTuple):
    """A schema and what it is about."""

    name: str
    schema: Schema

    @property
    def may_be_refused(self) -> bool:
        return bool(OPTIONAL & _keywords(self.schema))


def _keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_keywords, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema).union(*map(_keywords, schema.values()))


def cases(count: int, seed: int = 1) -> list[Case]:
    """The first `count`: what is written here, then random ones."""
    written = [Case(name, schema) for name, schema in _written()]
    draw = random.Random(seed)
    mixed = [Case(f"random {n}", _object(draw, 3)) for n in range(max(0, count - len(written)))]
    return (written + mixed)[:count]


def _in_object(schema: Any, *, required: bool = True, **more: Any) -> Schema:
    """Most servers want an object at the top."""
    return {
        "type": "object",
        "properties": {"it": schema},
        "required": ["it"] if required else [],
        "additionalProperties": False,
        **more,
    }


def _written() -> Iterator[tuple[str, Schema]]:
    for name, schema in (_STRINGS | _NUMBERS | _ARRAYS | _CHOICES | _OBJECTS | _OPTIONALS).items():
        yield name, _in_object(schema)
    yield from _TOPS.items()


_WORD: Final[Schema] = {"enum": ["one", "two", "three"]}
_SHORT: Final[Schema] = {"type": "string", "maxLength": 8}
_DIGIT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 9}

_STRINGS: Final[dict[str, Schema]] = {
    "string of no more than": {"type": "string", "maxLength": 5},
    "string of exactly": {"type": "string", "minLength": 3, "maxLength": 3},
    "empty string": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,6}$"},
    "pattern without anchors": {"type": "string", "pattern": "[0-9]{3}", "maxLength": 9},
    "pattern of choices": {"type": "string", "pattern": "^(cat|dog)-[0-9]{1,3}$"},
    "pattern of classes": {"type": "string", "pattern": r"^\d{2}\w{1,4}\s?x$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date and time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
}
_NUMBERS: Final[dict[str, Schema]] = {
    "integer range": {"type": "integer", "minimum": -5, "maximum": 17},
    "integer, exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 12},
    "large integers": {"type": "integer", "minimum": 999, "maximum": 100_001},
    "negative integers": {"type": "integer", "minimum": -120, "maximum": -7},
    "one integer": {"type": "integer", "minimum": 7, "maximum": 7},
    "number range": {"type": "number", "minimum": 0, "maximum": 1},
    "number, exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "number, negative": {"type": "number", "minimum": -2.5, "maximum": -0.5},
    "multiples": {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 15},
}
_ARRAYS: Final[dict[str, Schema]] = {
    "list of words": {"type": "array", "items": _WORD, "maxItems": 4},
    "list of at least": {"type": "array", "items": _DIGIT, "minItems": 2, "maxItems": 5},
    "list of exactly": {
        "type": "array",
        "items": {"type": "boolean"},
        "minItems": 3,
        "maxItems": 3,
    },
    "empty list": {"type": "array", "maxItems": 0},
    "tuple": {
        "type": "array",
        "prefixItems": [_WORD, _DIGIT],
        "items": False,
        "minItems": 2,
    },
    "tuple and more": {
        "type": "array",
        "prefixItems": [_WORD],
        "items": _DIGIT,
        "minItems": 1,
        "maxItems": 4,
    },
    "lists of lists": {
        "type": "array",
        "items": {"type": "array", "items": _DIGIT, "maxItems": 2},
        "maxItems": 3,
    },
    "list of objects": {"type": "array", "items": _in_object(_DIGIT), "minItems": 1, "maxItems": 3},
    "no two alike": {"type": "array", "items": _DIGIT, "maxItems": 3, "uniqueItems": True},
    "contains": {"type": "array", "items": _DIGIT, "contains": {"const": 3}, "maxItems": 3},
}
_CHOICES: Final[dict[str, Schema]] = {
    "enum of strings": _WORD,
    "enum of all kinds": {"enum": ["a", 1, 2.5, True, None, [1], {"a": 1}]},
    "enum with quotes": {"enum": ['a "quoted" one', "back\\slash", "new\nline", "ünïcode ☃"]},
    "const": {"const": "this"},
    "const object": {"const": {"a": [1, None], "b": False}},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 3},
    "anyOf": {"anyOf": [_DIGIT, _WORD, {"type": "null"}]},
    "anyOf of objects": {"anyOf": [_in_object(_DIGIT), _in_object(_WORD)]},
    "oneOf": {"oneOf": [_DIGIT, _WORD]},
    "oneOf that overlap": {
        "oneOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"const": 5}, {"const": 9}]
    },
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": _DIGIT}, "required": ["a"]},
            {"properties": {"b": _WORD}, "required": ["b"], "maxProperties": 2},
        ]
    },
    "everything": {"anyOf": [True, False]},
}
_OBJECTS: Final[dict[str, Schema]] = {
    "required and not": {
        "type": "object",
        "properties": {"a": _DIGIT, "b": _WORD, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "required and nowhere else": {
        "type": "object",
        "properties": {"a": _DIGIT},
        "required": ["a", "z"],
        "additionalProperties": _WORD,
        "maxProperties": 3,
    },
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "names with quotes": {
        "type": "object",
        "properties": {'a "b"': _DIGIT, "c\\d": _DIGIT, "é": _DIGIT, "": _DIGIT},
        "required": ['a "b"', "c\\d", "é", ""],
        "additionalProperties": False,
    },
    "objects in objects": _in_object(_in_object(_in_object(_in_object(_DIGIT)))),
    "thirty fields": {
        "type": "object",
        "properties": {f"f{n}": {"type": "boolean"} for n in range(30)},
        "required": [f"f{n}" for n in range(30)],
        "additionalProperties": False,
    },
}
_OPTIONALS: Final[dict[str, Schema]] = {
    "not": {"type": "integer", "minimum": 0, "maximum": 3, "not": {"const": 2}},
    "if then else": {
        "if": {"type": "integer"},
        "then": {"minimum": 2, "maximum": 4},
        "else": {"const": "no"},
    },
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": _DIGIT},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "names of a kind": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": _DIGIT,
        "maxProperties": 2,
    },
    "dependent required": {
        "type": "object",
        "properties": {"a": _DIGIT, "b": _DIGIT},
        "dependentRequired": {"a": ["b"]},
        "additionalProperties": False,
    },
    "at least two": {
        "type": "object",
        "properties": {"a": _DIGIT, "b": _DIGIT, "c": _DIGIT},
        "minProperties": 2,
        "additionalProperties": False,
    },
    "nothing unevaluated": {
        "type": "object",
        "properties": {"a": _DIGIT},
        "unevaluatedProperties": False,
    },
}
_TREE: Final[Schema] = {
    "type": "object",
    "properties": {
        "value": _DIGIT,
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}
_TOPS: Final[dict[str, Schema]] = {
    "$ref": {**_in_object({"$ref": "#/$defs/word"}), "$defs": {"word": _WORD}},
    "$ref to definitions": {
        **_in_object({"$ref": "#/definitions/word"}),
        "definitions": {"word": _WORD},
    },
    "$ref of a $ref": {
        **_in_object({"$ref": "#/$defs/a"}),
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": _DIGIT},
    },
    "a list that refers to itself": {**_TREE, "$defs": {"node": _TREE}},
    "a tree": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": _in_object({"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1})
        },
    },
    "a name that escapes": {
        **_in_object({"$ref": "#/$defs/a~1b"}),
        "$defs": {"a/b": _WORD},
    },
    "words that say nothing": {
        **_in_object({**_WORD, "title": "It", "description": "one", "examples": ["one"]}),
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Top",
        "default": {"it": "one"},
    },
    "a list at the top": {"type": "array", "items": _DIGIT, "minItems": 1, "maxItems": 3},
    "a word at the top": _WORD,
    "anyOf at the top": {"anyOf": [_in_object(_DIGIT), _in_object(_WORD)]},
}


# Random ones.


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["name", "kind", "size", "parts", "where", "note", "x y", "ß"], k=4)
    properties = {name: _any(draw, depth - 1) for name in names[: draw.randint(1, 4)]}
    required = [name for name in properties if draw.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _any(draw, depth - 1),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _either(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def _leaf(draw: random.Random, _: int) -> Schema:
    low = draw.randint(-1000, 1000)
    return draw.choice(
        [
            {"type": "boolean"},
            {"type": ["string", "null"], "maxLength": draw.randint(0, 9)},
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 2000)},
            {"enum": draw.sample(["red", "green", 1, 2.5, None, 'it\'s "so"'], k=3)},
            {"const": draw.choice(["yes", 0, False, None])},
            {
                "type": "string",
                "pattern": draw.choice(["^[A-Z][a-z]{1,5}$", "^[0-9]{2}:[0-9]{2}$"]),
            },
            dict(_SHORT),
        ]
    )


def _any(draw: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_leaf, _leaf]
    if depth > 0:
        kinds += [_object, _array, _either]
    return draw.choice(kinds)(draw, depth)
