"""JSON schemas at the borders of what numbers can be, and random answers held to them."""

from __future__ import annotations

import random
from decimal import Decimal
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from llguidance import LLMatcher, LLTokenizer

from wire.options import Structure
from wire.process.model import DEMO
from wire.process.structured_output import grammar_of, limits

Schema = dict[str, Any]

_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")
_VOCAB, _EOS = 1326, 0
# From here on an answer is brought to its end.
_LONG: Final = 30
_MOST: Final = 600
_ENDS: Final = (b'}]"', b",")

_WHOLE: Final = [0, 1, 2, 9, 10, 99, 2**31, 2**53, 10**15, 10**17, 10**18, 2**63, 2**64, 2**70]
_NEAR: Final = [sign * (whole + by) for whole in _WHOLE for by in (-1, 0, 1) for sign in (1, -1)]
_PARTS: Final = [
    *("0.5", "0.1", "0.25", "1e-17", "1.5", "2.5", "9.75", "0.3", "1e-7", "99.5", "1e16", "5e-324"),
    *(
        "0.30000000000000004",
        "0.12345678901234567",
        "0.1234567890123456789",
        "1e17",
        "1.0",
        "1e400",
    ),
    *("9007199254740992.5", "9007199254740993.0", "1e-400", "1.00000000000000000001", "3.14"),
]
_FRACTIONS: Final = [Decimal(sign + part) for part in _PARTS for sign in ("", "-")]
_NUMBERS: Final = st.one_of(
    st.integers(-20, 20), st.sampled_from(_NEAR), st.sampled_from(_FRACTIONS)
)
_KINDS: Final[list[Any]] = ["integer", "number", ["number", "integer"], ["integer", "null"]]
_DISTANCES: Final = list(map(Decimal, ("0", "1", "0.5", "1e-7", "0.000000000001")))
_COUNTS: Final = st.sampled_from([0, 1, 2, 3])
_STEPS: Final = st.sampled_from(
    [1, 2, 3, 7, 10, *map(Decimal, ("0.5", "0.1", "0.01", "0.25", "1.5", "2.5", "0.07"))]
)
_NAMES: Final = st.sampled_from(["a", "b", "x", "x1", "é", 'q"', "\t", "\x1f"])
_WORDS: Final = st.sampled_from(["", "a", "ab", "b", "x\ty", "é☃", '"', "\x01"])
_PATTERNS: Final = st.sampled_from(["^x$", "^x", "^[ab]", "^y[0-9]$", "^é"])


def _some(draw: DrawFn, keywords: dict[str, SearchStrategy[Any]], most: int = 3) -> Schema:
    names = draw(st.lists(st.sampled_from(sorted(keywords)), max_size=most, unique=True))
    return {name: draw(keywords[name]) for name in names}


_BOUNDS: Final = dict.fromkeys(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBERS
)


@st.composite
def _number(draw: DrawFn) -> Schema:
    kind = draw(st.sampled_from(_KINDS))
    bounds, is_close = _some(draw, _BOUNDS), draw(st.booleans())
    if bounds and is_close:  # two bounds next to one another
        base = draw(st.sampled_from(sorted(bounds)))
        other = draw(st.sampled_from(sorted(_BOUNDS)))
        by = draw(st.sampled_from(_DISTANCES))
        bounds.setdefault(other, _sum(bounds[base], by if "ax" in other else -by))
    return {"type": kind} | bounds | _some(draw, {"multipleOf": _STEPS}, 1)


def _sum(one: int | Decimal, other: int | Decimal) -> int | Decimal:
    total = Decimal(one) + Decimal(other)
    return int(total) if total == int(total) and abs(total) < 10**30 else total


_CONSTANTS: Final[SearchStrategy[Any]] = st.recursive(
    st.one_of(_NUMBERS, _WORDS, st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(_NAMES, inner, max_size=2)
    ),
    max_leaves=3,
)


_IDLE: Final[SearchStrategy[Schema]] = st.sampled_from(
    [{}, {"uniqueItems": False}, {"not": False, "minContains": 2}]
)


@st.composite
def _leaf(draw: DrawFn) -> Schema:
    kind = draw(st.sampled_from(["const", "enum", "string", "any", "number", "number"]))
    if kind == "const":
        return {"const": draw(_CONSTANTS)}
    if kind == "enum":
        return {"enum": draw(st.lists(_CONSTANTS, min_size=1, max_size=3))}
    if kind == "string":
        lengths = _some(draw, {"minLength": _COUNTS, "maxLength": _COUNTS}, 2)
        return {"type": "string"} | lengths
    if kind == "any":
        return draw(_IDLE) | _some(draw, _BOUNDS, 1)
    return draw(_number())


@st.composite
def _object(draw: DrawFn, inner: SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=3))
    names = [*properties, *draw(st.lists(_NAMES, max_size=1))]
    required = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    rest: dict[str, SearchStrategy[Any]] = {
        "patternProperties": st.dictionaries(_PATTERNS, inner, min_size=1, max_size=2),
        "additionalProperties": st.one_of(st.booleans(), inner),
        "minProperties": _COUNTS,
        "maxProperties": _COUNTS,
    }
    return {"type": "object", "properties": properties, "required": required} | _some(draw, rest)


@st.composite
def _array(draw: DrawFn, inner: SearchStrategy[Schema]) -> Schema:
    counts = _some(draw, {"minItems": _COUNTS, "maxItems": _COUNTS, "uniqueItems": st.just(False)})
    return {"type": "array", "items": draw(inner)} | counts


@st.composite
def _joined(draw: DrawFn, inner: SearchStrategy[Schema]) -> Schema:
    """Schemas that llguidance intersects."""
    key = draw(st.sampled_from(["anyOf", "allOf"]))
    schemas = draw(st.lists(inner, min_size=1, max_size=2))
    beside: Schema = draw(st.one_of(inner, _number(), _IDLE))
    return {key: schemas} | beside


def _inner(inner: SearchStrategy[Schema]) -> SearchStrategy[Schema]:
    return st.one_of(_object(inner), _array(inner), _joined(inner))


SCHEMAS: Final[SearchStrategy[Schema]] = st.recursive(_leaf(), _inner, max_leaves=4)


def structure(schema: Schema) -> Structure:
    return Structure("json_schema", _ENCODER.encode(schema).decode())


@cache
def _tokenizer() -> LLTokenizer:
    text = (DEMO / "tokenizer.json").read_text()
    return LLTokenizer(text, n_vocab=_VOCAB, eos_token=[_EOS])


@cache
def _words() -> list[bytes]:
    return [_tokenizer().decode_bytes([token_id]) for token_id in range(_VOCAB)]


def begun(structure: Structure) -> LLMatcher:
    return LLMatcher(_tokenizer(), grammar_of(structure), log_level=0, limits=limits())


def is_taken(structure: Structure, answer: str) -> bool:
    matcher = begun(structure)
    return matcher.consume_tokens(_tokenizer().tokenize_str(answer)) and matcher.is_accepting()


class DeadEnd(Exception):
    """Nothing can follow; a worker ends such a request with an error."""


def walk(matcher: LLMatcher, draw: random.Random) -> str:
    """Draw an answer.

    Raises:
        AssertionError: It comes to no end.
        DeadEnd: There is none.
    """
    words, answer = _words(), b""
    for length in range(_MOST):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if matcher.is_error() or not allowed:
            raise DeadEnd(answer, matcher.get_error())
        if _EOS in allowed and (len(allowed) == 1 or length > _LONG or draw.random() < 0.3):
            return answer.decode()
        allowed = [token_id for token_id in allowed if token_id != _EOS]
        if length > _LONG:
            for ends in _ENDS:
                if ending := [it for it in allowed if words[it][:1] in ends]:
                    allowed = ending
                    break
        chosen = draw.choice(allowed)
        answer += words[chosen]
        assert matcher.consume_token(chosen)
    raise AssertionError(f"no end after {answer[:200]!r}")
