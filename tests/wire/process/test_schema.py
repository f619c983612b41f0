"""Schemas are enforced as they are written: numbers, and names that are counted."""

from __future__ import annotations

import decimal
import json
import random
import subprocess
import sys

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.process.schemas import SCHEMAS, DeadEnd, Schema, begun, is_taken, structure, walk
from wire.options import Structure
from wire.process.structured_output import problem_of


def exact(text: str) -> decimal.Decimal | float:
    try:
        return decimal.Decimal(text)
    except decimal.InvalidOperation:  # the exponent is out of every range
        return float(text)


def is_valid(answer: str, schema: Schema) -> bool:
    with decimal.localcontext(prec=2000):
        value = json.loads(answer, parse_float=exact)
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@settings(max_examples=150, derandomize=True)
@given(SCHEMAS, st.integers(0, 2**32))
def test_every_answer_is_valid_by_a_schema_that_is_taken(schema: Schema, seed: int) -> None:
    if problem_of(structure(schema)) is not None:
        return
    draw, matcher = random.Random(seed), begun(structure(schema))
    for _ in range(4):
        try:
            answer = walk(matcher.deep_copy(), draw)
        except DeadEnd:  # "0.5" is no multiple of 0.25 for llguidance, "0.50" is
            assert "multipleOf" in str(schema)
            return
        assert is_valid(answer, schema), answer


def problem(text: str) -> str:
    return problem_of(Structure("json_schema", text)) or ""


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"const": 9007199254740993}', "const: 9007199254740993 "),
        ('{"properties": {"id": {"const": 9007199254740993}}}', "properties.id.const: "),
        ('{"items": {"enum": [1, 18446744073709551615]}}', "items.enum: 18446744073709551615 "),
        ('{"anyOf": [{"const": 1}, {"const": {"a": [1180591620717411303424]}}]}', "anyOf[1].const"),
        ('{"const": 0.1234567890123456789}', "const: 0.1234567890123456789 "),
        ('{"const": 1e-400}', "const: "),
        ('{"const": 1e9999999999999999999}', "exponent"),
        ('{"enum": ["a", "\\u0001"]}', "enum: answers cannot contain the character U+0001"),
        ('{"type": "integer", "minimum": 18446744073709551616}', "minimum: 18446744073709551616 "),
        ('{"type": "integer", "exclusiveMaximum": -1e30}', "exclusiveMaximum: -1E+30 "),
        ('{"type": "integer", "exclusiveMinimum": 9007199254740992}', "exclusiveMinimum: "),
        ('{"minimum": 9007199254740993}', "minimum: "),
        (
            '{"type": "number", "maximum": 1180591620717411303424}',
            "maximum: 1180591620717411303424 ",
        ),
        ('{"maximum": 0.12345678901234567891}', "maximum: "),
        ('{"minimum": 1e-99999999}', "minimum: 1E-99999999 has over 100 decimal places"),
        ('{"type": "number", "exclusiveMinimum": 0, "maximum": 1e-20}', "exclusiveMinimum: "),
        ('{"multipleOf": -99999}', "multipleOf: -99999 is not greater than 0"),
        ('{"multipleOf": 0.07}', "multipleOf: 0.07 "),
        ('{"allOf": [{"multipleOf": 1e-9}, {"multipleOf": 7}]}', "multiple of all multipleOf"),
        ('{"type": "object", "minProperties": 2}', "minProperties: "),
        ('{"patternProperties": {"^x$": {}}, "minProperties": 2}', "minProperties: "),
        (
            '{"patternProperties": {"^x": {}}, "minProperties": 3, "required": ["a", "a"]}',
            "minProperties: ",
        ),
        ('{"default": {"const": 1}, "$ref": "#/default"}', "$ref: #/default "),
        ('{"$ref": "#/$defs", "$defs": {"const": 9007199254740993}}', "$ref: #/$defs "),
        ('{"$ref": "#/a/properties", "a": {"properties": {"const": 0}}}', "$ref: #/a/properties "),
        ('{"$ref": "#/%24defs", "$defs": {"enum": [1e-400]}}', "$ref: #/%24defs "),
        ('{"type": "object", "minProperties": 3e0}', "minProperties: 3"),
        ('{"patternProperties": {"^x$": {}}, "required": ["x"]}', "patternProperties.^x$: say"),
        ('{"enum": [-12, -12.0]}', "alternatives"),  # the library panics
    ],
)
def test_values_that_llguidance_would_change_are_refused_with_their_path(
    text: str, path: str
) -> None:
    assert path in problem(text)
    assert path in (problem_of(Structure("lark", f"start: %json {text}")) or "")


def takes(text: str, answer: str) -> bool:
    assert problem(text) == ""
    return is_taken(Structure("json_schema", text), answer)


@pytest.mark.parametrize(
    ("text", "answers", "others"),
    [
        ('{"const": 9007199254740992}', ["9007199254740992"], ["9007199254740993"]),
        ('{"const": 1152921504606846976}', ["1152921504606846976"], ["1152921504606847000"]),
        ('{"const": 0.30000000000000004}', ["0.30000000000000004"], ["0.3"]),
        # Bounds beyond 64 bits are those of the integers that are held.
        (
            '{"type": "integer", "minimum": -9223372036854775808, "maximum": 18446744073709551615}',
            ["0", "-9223372036854774784", "9223372036854774784"],
            ["18446744073709551616", "-9223372036854775809"],
        ),
        (
            '{"type": "integer", "minimum": 1000000000000000000}',
            ["1000000000000000000"],
            ["999999999999999999"],
        ),
        (
            '{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}',
            ["0.5", "0.00000000000001"],
            ["0", "0.0", "-0"],
        ),
        (
            '{"type": "number", "exclusiveMinimum": 0, "minimum": 0, "maximum": 0.5}',
            ["0.5", "0.00000000000001"],
            ["0", "0.0", "-0"],
        ),
        (
            '{"type": "number", "exclusiveMinimum": 0, "minimum": 0.25, "maximum": 0.5}',
            ["0.5", "0.25"],
            ["0.2", "0.00000000000001"],
        ),
        (
            '{"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}',
            ["-0.5", "-0.00000000000001"],
            ["0", "-0"],
        ),
        (
            '{"type": "number", "allOf": [{"exclusiveMinimum": 3}, {"maximum": 3.5}]}',
            ["3.5", "3.1"],
            ["3", "3.0"],
        ),
        ('{"type": "number", "minimum": 3, "exclusiveMinimum": true}', ["4", "3.1"], ["3"]),
        ('{"minimum": 3, "anyOf": [{}], "exclusiveMinimum": true}', ["4"], ["3"]),
        ('{"type": "integer", "multipleOf": 2.5, "minimum": 6, "maximum": 12}', ["10"], ["7"]),
        (
            '{"required": ["a", "b"], "properties": {"a": {}, "b": {}}, "minProperties": 3}',
            ['{"a": 1, "b": 2, "c": 3}'],
            ['{"a": 1, "b": 2}', '{"a": 1, "b": 2, "\\u0061": 3}'],
        ),
        (
            '{"type": "object", "properties": {"a": {"type": "null"}, "\\t": {"type": "null"}}}',
            ['{"a": null}', '{"\\t": null}'],
            ['{"\\u0061": 1}', '{"\\u0009": 1}'],
        ),
    ],
)
def test_borders(text: str, answers: list[str], others: list[str]) -> None:
    assert [it for it in answers if not takes(text, it)] == []
    assert [it for it in others if takes(text, it)] == []


IDLE = [
    *('"uniqueItems": false', '"not": false', '"propertyNames": {}', '"propertyNames": true'),
    *('"unevaluatedItems": true', '"unevaluatedItems": {}', '"dependentRequired": {}'),
    *('"unevaluatedProperties": true', '"unevaluatedProperties": {}', '"dependentSchemas": {}'),
    *('"dependencies": {}', '"if": {}', '"then": false', '"else": false', '"maxContains": 1'),
    *('"minimum": 0, "exclusiveMinimum": false', '"minContains": 2', '"minProperties": 1'),
]


@pytest.mark.parametrize("keyword", IDLE)
def test_keywords_that_ask_for_nothing_are_taken(keyword: str) -> None:
    assert takes(f'{{"items": {{{keyword}}}}}', "[1]")


def test_only_keywords_are_rewritten() -> None:
    constant = {"uniqueItems": False, "minimum": 3, "exclusiveMinimum": True}
    text = json.dumps(constant)
    assert takes(f'{{"const": {text}}}', text)
    assert takes('{"properties": {"uniqueItems": false, "const": {"const": 1}}}', '{"const": 1}')
    assert not takes('{"properties": {"uniqueItems": false}}', '{"uniqueItems": 1}')


def test_the_least_integer_of_64_bits_ends_no_process() -> None:
    text = '{"const": -9223372036854775808}'
    code = (
        "from wire.options import Structure; from wire.process.structured_output import problem_of;"
        f"print(problem_of(Structure('json_schema', '{text}')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("const: ")


@pytest.mark.parametrize(
    "value", ["5", "[5]", "{}", '"a"', "null", "true", "[[]]", "1e400", "[{}]"]
)
def test_keywords_of_any_kind_are_looked_at(value: str) -> None:
    for keyword in (
        *("type", "required", "properties", "patternProperties", "minProperties", "enum", "const"),
        *("minimum", "exclusiveMaximum", "multipleOf", "$ref", "allOf", "items", "not", "$defs"),
    ):
        problem_of(Structure("json_schema", f'{{"type": "integer", "{keyword}": {value}}}'))
        problem_of(Structure("json_schema", f'{{"{keyword}": {value}, "minProperties": 0}}'))
