"""JSON schemas for acceptance: each keyword alone, then random ones that mix them.

What a model draws from them ends soon, for every string, list and number has a bound somewhere;
what may be refused by a server is marked, and everything else must work.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
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


def _written() -> Iterator[tuple[str, Schema]]:
    """Those in the file; most servers want an object at the top."""
    written = json.loads(Path(__file__).with_name("schemas.json").read_text())
    for name, schema in written["of a property"].items():
        yield name, _object_of({"it": schema}, ["it"])
    yield from written["whole"].items()


def _object_of(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


# Random ones.


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["name", "kind", "size", "parts", "where", "note", "x y", "ß"], k=4)
    properties = {name: _any(draw, depth - 1) for name in names[: draw.randint(1, 4)]}
    return _object_of(properties, [name for name in properties if draw.random() < 0.7])


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
            {"type": "string", "maxLength": 8},
        ]
    )


def _any(draw: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_leaf, _leaf]
    if depth > 0:
        kinds += [_object, _array, _either]
    return draw.choice(kinds)(draw, depth)
