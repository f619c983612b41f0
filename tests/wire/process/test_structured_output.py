"""Structures: valid and invalid ones, and none compiles without bound."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import Any

import pytest

from wire.options import Structure
from wire.process.lifetime import STACK_BYTES
from wire.process.schema import MAX_MULTIPLE
from wire.process.structured_output import StructureError, embedded, grammar_of, problem_of

json_of, regex, lark = (partial(Structure, kind) for kind in ("json_schema", "regex", "lark"))


def schema(value: object) -> Structure:
    return json_of(json.dumps(value))


def chain(length: int) -> Structure:
    """A schema that refers to one that refers to one …"""
    links = {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(length)}
    return schema({"$ref": "#/$defs/0", "$defs": links | {str(length): {"type": "string"}}})


def rules(length: int, rule: str = "r{n}: r{next}") -> str:
    """A grammar of rules of which each names the next."""
    lines = [rule.format(n=n, next=n + 1) for n in range(length)]
    return "\n".join(["start: r0", *lines, f'r{length}: "a"'])


def doubled(num_times: int) -> str:
    """A grammar with a terminal of terminals of terminals …, each twice in the one before."""
    lines = [f"T{n}: T{n + 1} T{n + 1}" for n in range(num_times)]
    return "\n".join(["start: T0", *lines, f'T{num_times}: "a"?'])


def nested(value: object, depth: int) -> object:
    return nested({"items": value}, depth - 1) if depth else value


@pytest.mark.parametrize(
    "structure",
    [
        schema({"type": "object"}),
        schema({"type": "array", "items": {"$ref": "#"}}),
        schema({"type": "object", "title": "T", "my-note": 1, "required": ["a"]}),
        chain(100),
        regex("[a-z]+ (yes|no)"),
        *map(regex, ("a{10000}", "[{1,2}]{9000}", r"\({5}(x[)(]{3}){4}", "(ab{20}c){900}")),
        lark('start: "yes" | "no"'),
        lark(f"start: {embedded({'type': 'integer'})}"),
        lark('start: /%json/ "%json" # %json\n'),
        lark("start: /a/ | </s> | " + '"word" | ' * 1000 + "/b/"),
        lark('start: T r ["b"]\nT: "a"\nr[stop="]:"]: /x*/'),
        lark(f"start: W+\nW: {' | '.join(f'{n!r}'.join(chr(34) * 2) for n in range(2000))}"),
        lark(doubled(10)),
    ],
)
def test_supported_structures_have_no_problem(structure: Structure) -> None:
    assert problem_of(structure) is None


LONG = '"a"? ' * 10_000


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        (schema({"uniqueItems": True}), "uniqueItems"),
        (schema({"properties": {"a": {"not": {}}}}), "not"),
        (schema({"type": "array", "contains": {}}), "contains"),
        (schema({"if": {}, "then": False}), "if"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (schema({"format": "lunar-date"}), "lunar-date"),
        (schema({"type": "thing"}), "thing"),
        (schema({"$ref": "http://localhost/schema"}), "localhost"),
        (schema({"enum": []}), "anyOf is empty"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "greater than maximum"),
        (schema({"x-guidance": {"lenient": True}, "uniqueItems": True}), "x-guidance"),
        (schema({"items": {"x-guidance": {"lenient": True}, "uniqueItems": True}}), "uniqueItems"),
        (schema(True), "not a JSON object"),
        (json_of("{"), "no JSON"),
        (json_of('{"items":' * 5000), "no JSON"),
        (json_of('{"items":' * 200 + "{}" + "}" * 200), "recursion"),
        (regex("(a"), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (lark("start: nothing"), "nothing"),
        (lark("start: %json {"), "%json"),
        (regex("a?" * 3000), "6000 characters, over 4096"),
        (regex("((a{100}){100}){100}"), "repetitions within repetitions"),
        (regex("(?:x|(ab{200}){200})"), "repetitions within repetitions"),
        (regex("(a{200}b){200}"), "repetitions within repetitions"),
        (lark('start: (("a"{100}){100}){100}'), "repetitions within repetitions"),
        (lark("start: /" + "a?" * 3000 + "/"), "over 4096"),
        (json_of('{"pattern": "' + "a?" * 3000 + '"}'), "over 4096"),
        (json_of('{"pattern": "((a{200}){200})"}'), "repetitions within"),
        (json_of('{"patternProperties": {"((a{200}){200})": {}}}'), "repetitions"),
        *[
            (lark(f'start: {begin} (("a"{{100}}){{100}}){{100}}'), "repetitions within")
            for begin in ('"["', "/[/", '["a" "]"')
        ],
        (lark("start: /" + "abcdefghijkl?\n" * 400 + "/"), "over 4096"),
        (lark('start: %json {"x-guidance": {"lenient": true}}'), "x-guidance"),
        (lark('start: %json {"x-guidance": {"coerce_one_of": true}}'), "x-guidance"),
        (chain(1500), "refers to"),
        (schema(nested({"anyOf": [{"$ref": f"#/$defs/{n}"} for n in range(40)]}, 40)), "refers to"),
        (lark(rules(2500)), "too deep"),
        (lark(rules(400, "r{n}: " + "[" * 28 + "r{next}" + "]" * 28)), "too deep"),
        (lark('start: "a"\n' + '%ignore " "\n' * 5000), "too deep"),
        (lark(doubled(16)), "written out"),
        (lark('start: T\nA: "a"?\nT: ' + "A " * 20_000), "written out"),
        (lark("start: T\nT: " + LONG), "written out"),
        (lark("start: r\nr[lazy]: " + LONG), "written out"),
        (lark('start: T\nT: /%json "/ ' + "A? " * 10_000 + '""\nA: "a"'), "written out"),
        (
            lark(
                "start: A | B | C\n"
                + "\n".join(name + ": " + '(T | "b") ' * 1500 for name in "ABC")
                + '\nT: "a"? "b"?'
            ),
            "written out",
        ),
    ],
)
def test_unsupported_structures_are_refused_with_the_reason(
    structure: Structure, said: str
) -> None:
    problem = problem_of(structure)
    assert problem is not None and said in problem
    assert len(problem) <= 200 and "\n" not in problem


def joined(num_patterns: int) -> dict[str, Any]:
    return {
        "allOf": [{"type": "string", "pattern": f".*{chr(97 + n)}.*"} for n in range(num_patterns)]
    }


BOUNDLESS = {
    "many patterns joined": joined(26),
    "patterns joined one by one": {
        "$defs": {
            f"d{n}": {"pattern": f".*{chr(97 + n)}.*", "$ref": f"#/$defs/d{n + 1}"}
            for n in range(25)
        }
        | {"d25": {"type": "string"}},
        "$ref": "#/$defs/d0",
    },
    "a large multiple": {"type": "integer", "multipleOf": 999_983},
    "a multiple of many digits": {"type": "number", "multipleOf": 99.9983},
    "a vast multiple": {"type": "number", "multipleOf": 1e300},
    "multiples that are large together": {
        "allOf": [{"type": "integer", "multipleOf": prime} for prime in (997, 1009)]
    },
    "many names of properties": {
        "patternProperties": {f"^x{number}[a-z]*$": True for number in range(600)}
    },
}


@pytest.mark.parametrize("name", BOUNDLESS)
def test_schemas_that_take_minutes_to_compile_are_refused(name: str) -> None:
    with pytest.raises(StructureError):
        grammar_of(schema(BOUNDLESS[name]))
    with pytest.raises(StructureError):
        grammar_of(lark(f"start: %json {json.dumps(BOUNDLESS[name])}"))


def test_schemas_just_within_the_limits_are_accepted() -> None:
    grammar_of(schema(joined(8)))
    many = {f"p{n}": {"type": "string", "pattern": f"^{n}[a-z]*$"} for n in range(50)}
    assert problem_of(schema({"type": "object", "properties": many})) is None
    noted = {"$ref": "#/$defs/a", "description": "An a."}  # what is beside joins nothing
    assert problem_of(schema({"$defs": {"a": {}}, "properties": many | {"a": noted}})) is None
    for step in (1, 5, 0.01, 0.25, MAX_MULTIPLE, True):
        grammar_of(schema({"type": "number", "multipleOf": step}))


def links(length: int, begin: str, end: str) -> str:
    """The text of a schema that refers to one that refers to one …"""
    each = [f'"{n}": {begin}{{"$ref": "#/$defs/{n + 1}"}}{end}' for n in range(length)]
    defs = ", ".join([*each, f'"{length}": {{"type": "string"}}'])
    return f'{{"$ref": "#/$defs/0", "$defs": {{{defs}}}}}'


DEEPEST = [
    links(38, '{"items":' * 20, "}" * 20),
    links(68, '{"properties": {"a":' * 5, "}}" * 5),
    links(160, '{"prefixItems": [', '], "minItems": 1}'),
]


@pytest.mark.parametrize(
    "structure",
    [
        *[json_of(text) for text in DEEPEST],
        *[lark(rules(900).replace('r900: "a"', f"r900: %json {text}")) for text in DEEPEST],
        lark(rules(990)),
        lark(rules(34, "r{n}: " + "(" * 28 + "r{next}" + ")" * 28)),
        regex("(" * 250 + "a" + ")" * 250),
    ],
)
def test_structures_of_the_largest_depth_need_half_a_stack(structure: Structure) -> None:
    found: list[str | None] = []
    before = threading.stack_size(STACK_BYTES // 2)
    try:
        thread = threading.Thread(target=lambda: found.append(problem_of(structure)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert found == [None]


@pytest.mark.parametrize(
    "structure",
    [
        schema({"pattern": "x" * 4000, "enum": [{}] * 15_000}),
        schema({"anyOf": [{"type": "string", "pattern": f"p{n}"} for n in range(1300)]}),
        regex("[" * 4000),
        regex("a{}{,}" + "{1" * 1900),
        lark("start: " + '["' * 20_000),
        lark('start: "' + '\\"' * 30_000),
        lark("start: " + "(" * 60_000),
        lark("start: a" + " " * 60_000),
        lark("start: " + "a[" * 30_000),
        lark("start: " + 'a["' * 20_000),
        lark("start: " + "<a" * 30_000),
    ],
)
@pytest.mark.timeout(20)
def test_hostile_structures_are_checked_in_bounded_time(structure: Structure) -> None:
    problem_of(structure)
