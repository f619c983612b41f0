"""Rewrite a JSON schema so that llguidance enforces what it says, or refuse it by name.

llguidance reads numbers as doubles and writes bounds as patterns of 64-bit integers and shortest
decimals, so some numbers would change, and -2^63 ends the process.  So each number is compared with
what llguidance would make of it.  An integer bound beyond 64 bits becomes the last integer that
llguidance holds, and an exclusive bound that it would include is moved inwards: valid answers,
though fewer.  Everything else that would change is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Final, NoReturn, TypeGuard
from urllib.parse import unquote

import msgspec

# The largest double below 2^63: llguidance negates bounds, and -2^63 has no negative.
_MAX_INTEGER: Final = 2**63 - 1024
# Where a bound has no opposite, llguidance writes the next power of ten as an integer of 64 bits.
_MAX_NUMBER: Final = 10**18
# A bound takes one nested group for each of its decimal places; answers have no exponents.
_MAX_PLACES: Final = 100
# Digits that every double holds.
_NUM_DIGITS: Final = 15
# Remainders by 10^4 take 30 ms and 6 MB, those by 10^5 seconds.
MAX_MULTIPLE: Final = 10_000
# llguidance writes names of `properties` in one way; so other names must have one spelling too, or
# "\u0061" could stand beside "a".
ESCAPES: Final = 'nrbtf\\"'
# Of a path or a number in a message.
_MAX_SHOWN: Final = 60
_UNWRITABLE: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_JOINS: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# Keywords beside which a join joins nothing.
_ANNOTATIONS: Final = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"}
    | {"examples", "deprecated", "readOnly", "writeOnly", "nullable"}
)
# Keywords whose value maps names to schemas, and those whose value is no schema.
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
# Keywords that llguidance does not know, with the values by which they ask for nothing.
_IDLE: Final[dict[str, tuple[object, ...]]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
# A pattern that one name alone matches.
_ONE_NAME: Final = re.compile(r"\^([\w -]*)\$")
_SIDES: Final = ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum"))


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"the exponent of {text[:40]} is too large") from None


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


# Decoder().raw_decode reads a schema within a grammar.
DECODER: Final = json.JSONDecoder(parse_float=_decimal, parse_constant=_constant)
_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")


def encoded(schema: object) -> str:
    """Return a schema as JSON, with every number exactly as it was read."""
    return _ENCODER.encode(schema).decode()


def objects(schema: object) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value."""
    found = [schema]
    while found:
        value = found.pop()
        if isinstance(value, dict):
            found += value.values()
            yield value
        elif isinstance(value, list):
            found += value


def is_joined(node: dict[str, Any]) -> bool:
    """Return whether llguidance intersects this schema with others."""
    constraints = node.keys() - _ANNOTATIONS
    if len(constraints) > 1 and not constraints.isdisjoint(_JOINS):
        return True
    return isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1


def settle(schema: object) -> None:
    """Rewrite a schema in place.  Raises ValueError."""
    has_joins = any(map(is_joined, objects(schema)))
    steps: list[Decimal] = []
    waiting = [("", schema)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, list):
            waiting += [(f"{path}[{number}]", item) for number, item in enumerate(node)]
        if not isinstance(node, dict) or not node:
            continue
        found = _Node(f"{path}." if path else "", node)
        found.settle(has_joins=has_joins)
        steps += found.steps
        for key, value in node.items():
            place = f"{path}.{key}" if path else key
            if key in _MAPS and isinstance(value, dict):
                waiting += [(f"{place}.{name}", item) for name, item in value.items()]
            elif key not in _VALUES:
                waiting.append((place, value))
    _check_multiples(steps, has_joins=has_joins)


class _Node:
    """One schema, without its subschemas."""

    def __init__(self, place: str, keywords: dict[str, Any]) -> None:
        self._place = place
        self._keywords = keywords
        kinds = keywords.get("type", ["number"])
        self._kinds = kinds if isinstance(kinds, list) else [kinds]
        self._is_integer = "integer" in self._kinds and "number" not in self._kinds
        self.steps: list[Decimal] = []  # its multipleOf, once it is settled

    def settle(self, *, has_joins: bool) -> None:
        self._drop_idle()
        self._check_reference()
        for key in ("const", "enum"):
            self._check_values(key)
        if "number" in self._kinds or self._is_integer:
            for sign, inclusive, exclusive in _SIDES:
                self._settle_draft_4(inclusive, exclusive)
                if self._is_integer:
                    self._settle_integer(sign, inclusive, exclusive)
                else:
                    self._settle_number(sign, inclusive, exclusive)
            for sign, inclusive, exclusive in _SIDES:
                self._nudge(sign, inclusive, exclusive, has_joins=has_joins)
            self._settle_multiple()
        self._check_names()

    def _refuse(self, key: str, why: str) -> NoReturn:
        raise ValueError(f"{self._place[-_MAX_SHOWN:]}{key}: {why}")

    def _drop_idle(self) -> None:
        """Remove keywords that ask for nothing; llguidance refuses all that it does not know."""
        keywords = self._keywords
        for key, idle in _IDLE.items():
            value = keywords.get(key)
            if isinstance(value, bool | dict) and value in idle:
                del keywords[key]
        if "if" not in keywords or keywords.keys().isdisjoint({"then", "else"}):
            for key in ("if", "then", "else"):
                keywords.pop(key, None)
        if "contains" not in keywords:
            for key in ("minContains", "maxContains"):
                keywords.pop(key, None)

    def _check_reference(self) -> None:
        """Refuse a reference to what this walk takes for a value, or for a map of names."""
        reference = self._keywords.get("$ref")
        if not isinstance(reference, str):
            return
        steps = iter(unquote(reference.partition("#")[2]).split("/"))
        for step in steps:
            if step in _VALUES:
                self._refuse("$ref", f"{reference} is no schema, but a value within {step}")
            if step in _MAPS and next(steps, None) is None:
                self._refuse("$ref", f"{reference} is no schema, but maps names to schemas")

    def _check_values(self, key: str) -> None:
        """Refuse a constant that llguidance would write as another, or cannot write."""
        waiting = [self._keywords.get(key)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
            elif isinstance(value, str) and (found := _UNWRITABLE.search(value)):
                self._refuse(key, f"answers cannot contain the character U+{ord(found[0]):04X}")
            elif _is_number(value):
                self._check_places(key, value)
                if not _is_exact(value, is_integer=isinstance(value, int)):
                    self._refuse(
                        key, f"{_shown(value)} does not survive as a double; use a string instead"
                    )

    def _check_places(self, key: str, value: int | Decimal) -> None:
        if isinstance(value, Decimal) and -_exponent(value) > _MAX_PLACES:
            self._refuse(key, f"{_shown(value)} has over {_MAX_PLACES} decimal places")

    def _settle_draft_4(self, inclusive: str, exclusive: str) -> None:
        """Replace `"minimum": 3, "exclusiveMinimum": true` by what later drafts say for it."""
        if isinstance(self._keywords.get(exclusive), bool):
            is_exclusive = self._keywords.pop(exclusive)
            if is_exclusive and inclusive in self._keywords:
                self._keywords[exclusive] = self._keywords.pop(inclusive)

    def _bound(self, sign: int, key: str) -> Fraction | None:
        """Return a bound as a lower one: the upper bound 5 is -5."""
        value = self._keywords.get(key)
        if not _is_number(value):
            return None  # llguidance refuses what is there but no number
        self._check_places(key, value)
        return sign * Fraction(max(-(2**64), min(value, 2**64)) if value else 0)

    def _settle_integer(self, sign: int, inclusive: str, exclusive: str) -> None:
        """Replace both bounds by the first integer that they allow."""
        found = [
            (math.floor(bound) + 1 if key is exclusive else math.ceil(bound), key)
            for key in (inclusive, exclusive)
            if (bound := self._bound(sign, key)) is not None
        ]
        if not found:
            return
        first, key = max(found)
        first = max(first, -_MAX_INTEGER)
        if first > _MAX_INTEGER or not _is_exact(first, is_integer=True):
            value = _shown(self._keywords[key])
            self._refuse(key, f"{value} does not survive as a double, or is over 2^63 - 1024")
        self._keywords.pop(exclusive, None)
        self._keywords[inclusive] = sign * first
        opposite = "maximum" if sign > 0 else "minimum"
        if first >= _MAX_NUMBER:
            self._keywords.setdefault(opposite, sign * _MAX_INTEGER)

    def _settle_number(self, sign: int, inclusive: str, exclusive: str) -> None:
        """Refuse bounds that llguidance would move."""
        for key in (inclusive, exclusive):
            if (bound := self._bound(sign, key)) is None:
                continue
            value = self._keywords[key]
            if not -_MAX_NUMBER < value < _MAX_NUMBER:
                self._refuse(key, f"{_shown(value)} is not between -10^18 and 10^18")
            # Next to an exclusive bound, integers begin at the next one.
            is_next_exact = bound.denominator > 1 or _is_exact(int(bound) + 1, is_integer=True)
            if not _is_exact(value, is_integer=False) or (key is exclusive and not is_next_exact):
                self._refuse(key, f"{_shown(value)} does not survive as a double")

    def _nudge(self, sign: int, inclusive: str, exclusive: str, *, has_joins: bool) -> None:
        """Move an exclusive bound that llguidance would include.

        It does where a whole number is excluded and the other bound is before the next one.  Where
        schemas are combined, the other bound may be in another schema.
        """
        bound = self._bound(sign, exclusive)
        if bound is None or bound.denominator > 1 or bound < 0:
            return
        others = [self._bound(-sign, key) for key in _SIDES[sign > 0][1:]]
        last = min((-other for other in others if other is not None), default=bound + 1)
        if last >= bound + 1 and not has_joins:
            return
        num_places = _NUM_DIGITS - len(str(bound))
        if num_places < 1 or last < (moved := bound + Fraction(1, 10**num_places)):
            self._refuse(exclusive, "no number is far enough from it, and within the other bound")
        del self._keywords[exclusive]
        given = self._bound(sign, inclusive)
        if given is None or given < moved:
            self._keywords[inclusive] = Decimal(sign * moved.numerator) / moved.denominator

    def _settle_multiple(self) -> None:
        step = self._keywords.get("multipleOf")
        if not _is_number(step):
            return
        if step <= 0:
            self._refuse("multipleOf", f"{_shown(step)} is not greater than 0")
        if not _is_exact(step, is_integer=False) or _as_multiple(float(step)) != step:
            self._refuse("multipleOf", f"{_shown(step)} does not survive as a double")
        if self._is_integer:
            # The integers among the multiples of 2.5 are those of 5.
            self._keywords["multipleOf"] = step = Fraction(step).numerator
        self.steps.append(Decimal(step))

    def _check_names(self) -> None:
        """Refuse patterns that leave no name, and counts that a repeated name would meet."""
        keywords = self._keywords
        if "type" in keywords and "object" not in self._kinds:
            return
        required, properties = _names(keywords.get("required")), _names(keywords.get("properties"))
        count, patterns = keywords.get("minProperties"), _names(keywords.get("patternProperties"))
        for pattern in patterns:
            found = _ONE_NAME.fullmatch(pattern)
            if found and found[1] in required | properties:
                # llguidance would begin a second property, for which no name is left.
                self._refuse(f"patternProperties.{pattern}", "say this in `properties`")
        is_closed = keywords.get("additionalProperties") is False and not patterns
        if _is_number(count) and count > len(required) + 1 and not is_closed:
            self._refuse(
                "minProperties",
                f"{count} is over 1 + the {len(required)} names in `required`; two of the others "
                "could be the same",
            )


def _check_multiples(steps: list[Decimal], *, has_joins: bool) -> None:
    """Refuse `multipleOf` values that take too long: 0.25 costs as much as 25.

    Where schemas are combined, llguidance gives all the same number of decimal places first.
    """
    places = [max(0, -_exponent(step.normalize())) for step in steps]
    if has_joins:
        places = [max(places, default=0)] * len(steps)
    wholes = [int(step.scaleb(num)) for step, num in zip(steps, places, strict=True)]
    if math.lcm(*wholes) > MAX_MULTIPLE:
        raise ValueError(f"the least common multiple of all multipleOf is over {MAX_MULTIPLE}")


def _names(value: object) -> set[str]:
    """Return the strings in a list, or the keys of an object; none of what is neither."""
    return {it for it in value if isinstance(it, str)} if isinstance(value, dict | list) else set()


def _is_number(value: object) -> TypeGuard[int | Decimal]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_exact(value: int | Decimal, *, is_integer: bool) -> bool:
    """Return whether llguidance reads a number as this one, as an integer or as either kind."""
    if not -(2**63) < value < 2**63:
        return False
    number = float(value)
    if (is_integer or number.is_integer()) and int(number) != value:
        return False
    return is_integer or Decimal(repr(number)) == value


def _as_multiple(step: float) -> Decimal:
    """Return what llguidance makes of a step."""
    num_places = 0
    while not step.is_integer():
        step *= 10
        num_places += 1
    return Decimal(int(step)).scaleb(-num_places)


def _exponent(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), "JSON has neither NaN nor infinity"
    return exponent


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
