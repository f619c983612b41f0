"""Structures: valid and invalid ones, and none compiles without bound."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from wire.options import Structure
from wire.process.lifetime import STACK_BYTES
from wire.process.schema import MAX_MULTIPLE
from wire.process.structured_output import StructureError, embedded, grammar_of, problem_of


def schema(value: object) -> Structure:
    return Structure(kind="json_schema", text=json.dumps(value))


def test_supported_structures_have_no_problem() -> None:
    for structure in (
        schema({"type": "object"}),
        schema({"type": "array", "items": {"$ref": "#"}}),
        schema({"type": "object", "title": "T", "my-note": 1, "required": ["a"]}),
        Structure(kind="regex", text="[a-z]+ (yes|no)"),
        Structure(kind="lark", text='start: "yes" | "no"'),
        Structure(kind="lark", text=f"start: {embedded({'type': 'integer'})}"),
    ):
        assert problem_of(structure) is None, structure


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
        (Structure(kind="json_schema", text="{"), "no JSON"),
        (Structure(kind="json_schema", text='{"items":' * 5000), "no JSON"),
        (Structure(kind="json_schema", text='{"items":' * 200 + "{}" + "}" * 200), "recursion"),
        (Structure(kind="regex", text="(a"), "unclosed group"),
        (Structure(kind="regex", text="(?=a)b"), "look-around"),
        (Structure(kind="lark", text="start: nothing"), "nothing"),
        (Structure(kind="lark", text="start: %json {"), "%json"),
    ],
)
def test_unsupported_structures_are_refused_with_the_keyword(
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
        grammar_of(Structure(kind="lark", text=f"start: %json {json.dumps(BOUNDLESS[name])}"))


def test_schemas_just_within_the_limits_are_accepted() -> None:
    grammar_of(schema(joined(8)))
    many = {f"p{n}": {"type": "string", "pattern": f"^{n}[a-z]*$"} for n in range(50)}
    assert problem_of(schema({"type": "object", "properties": many})) is None
    noted = {"$ref": "#/$defs/a", "description": "An a."}  # what is beside joins nothing
    assert problem_of(schema({"$defs": {"a": {}}, "properties": many | {"a": noted}})) is None
    for step in (1, 5, 0.01, 0.25, MAX_MULTIPLE, True):
        grammar_of(schema({"type": "number", "multipleOf": step}))


@pytest.mark.parametrize(
    ("structure", "why"),
    [
        (Structure("regex", "a?" * 3000), "6000 characters, over 4096"),
        (Structure("regex", "((a{100}){100}){100}"), "repetitions within repetitions"),
        (Structure("regex", "(?:x|(ab{200}){200})"), "repetitions within repetitions"),
        (Structure("regex", "(a{200}b){200}"), "repetitions within repetitions"),
        (Structure("lark", 'start: (("a"{100}){100}){100}'), "repetitions within repetitions"),
        (Structure("lark", "start: /" + "a?" * 3000 + "/"), "over 4096"),
        (Structure("json_schema", '{"pattern": "' + "a?" * 3000 + '"}'), "over 4096"),
        (Structure("json_schema", '{"pattern": "((a{200}){200})"}'), "repetitions within"),
        (Structure("json_schema", '{"patternProperties": {"((a{200}){200})": {}}}'), "repetitions"),
    ],
)
def test_patterns_that_would_take_seconds_are_refused(structure: Structure, why: str) -> None:
    assert why in (problem_of(structure) or "")


@pytest.mark.parametrize(
    "pattern", ["a{10000}", "[{1,2}]{9000}", r"\({5}(x[)(]{3}){4}", "(ab{20}c){900}"]
)
def test_counts_that_are_cheap_are_taken(pattern: str) -> None:
    assert problem_of(Structure("regex", pattern)) is None


@pytest.mark.parametrize("option", ["lenient", "coerce_one_of"])
def test_no_grammar_makes_schemas_loose(option: str) -> None:
    loose = json.dumps({"type": "string", "x-guidance": {option: True}})
    assert "x-guidance" in (problem_of(Structure("lark", f"start: %json {loose}")) or "")


def chain(length: int) -> Structure:
    """A schema that refers to one that refers to one …"""
    links = {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(length)}
    return schema({"$ref": "#/$defs/0", "$defs": links | {str(length): {"type": "string"}}})


def test_chains_of_references_end_before_the_stack_does() -> None:
    assert problem_of(chain(100)) is None
    assert "refers to" in (problem_of(chain(1500)) or "")
    deep: dict[str, Any] = {"anyOf": [{"$ref": f"#/$defs/{n}"} for n in range(40)]}
    for _ in range(40):
        deep = {"items": deep}
    assert "refers to" in (problem_of(schema(deep)) or "")


def rules(length: int, rule: str = "r{n}: r{next}") -> str:
    """A grammar of rules of which each names the next."""
    lines = [rule.format(n=n, next=n + 1) for n in range(length)]
    return "\n".join(["start: r0", *lines, f'r{length}: "a"'])


@pytest.mark.parametrize(
    "grammar",
    [
        rules(2500),
        rules(400, "r{n}: " + "[" * 28 + "r{next}" + "]" * 28),
        'start: "a"\n' + '%ignore " "\n' * 5000,
    ],
)
def test_rules_that_name_one_another_end_before_the_stack_does(grammar: str) -> None:
    assert "too deep" in (problem_of(Structure("lark", grammar)) or "")


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
        *[Structure("json_schema", text) for text in DEEPEST],
        *[
            Structure("lark", rules(900).replace('r900: "a"', f"r900: %json {text}"))
            for text in DEEPEST
        ],
        Structure("lark", rules(990)),
        Structure("lark", rules(34, "r{n}: " + "(" * 28 + "r{next}" + ")" * 28)),
        Structure("regex", "(" * 250 + "a" + ")" * 250),
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
        Structure("regex", "[" * 4000),
        Structure("regex", "a{}{,}" + "{1" * 1900),
        Structure("lark", "start: " + '["' * 20_000),
        Structure("lark", 'start: "' + '\\"' * 30_000),
        Structure("lark", "start: " + "(" * 60_000),
        Structure("lark", "start: a" + " " * 60_000),
        Structure("lark", "start: " + "a[" * 30_000),
        Structure("lark", "start: " + 'a["' * 20_000),
        Structure("lark", "start: " + "<a" * 30_000),
    ],
)
@pytest.mark.timeout(20)
def test_hostile_structures_are_checked_in_bounded_time(structure: Structure) -> None:
    problem_of(structure)


@pytest.mark.parametrize("begin", ['"["', "/[/", '["a" "]"'])
def test_brackets_hide_no_repetitions(begin: str) -> None:
    rules = f'start: {begin} (("a"{{100}}){{100}}){{100}}'
    assert "repetitions within" in (problem_of(Structure("lark", rules)) or "")


def doubled(num_times: int) -> str:
    """A grammar with a terminal of terminals of terminals …, each twice in the one before."""
    lines = [f"T{n}: T{n + 1} T{n + 1}" for n in range(num_times)]
    return "\n".join(["start: T0", *lines, f'T{num_times}: "a"?'])


@pytest.mark.parametrize(
    "rules",
    [
        doubled(16),
        'start: T\nA: "a"?\nT: ' + "A " * 20_000,
        "start: T\nT: " + '"a"? ' * 10_000,
        "start: r\nr[lazy]: " + '"a"? ' * 10_000,
        'start: T\nT: /%json "/ ' + "A? " * 10_000 + '""\nA: "a"',
        "start: A | B | C\n"
        + "\n".join(name + ": " + '(T | "b") ' * 1500 for name in "ABC")
        + '\nT: "a"? "b"?',
    ],
)
def test_terminals_that_are_long_when_written_out_are_refused(rules: str) -> None:
    assert "written out" in (problem_of(Structure("lark", rules)) or "")


def test_terminals_of_usual_grammars_are_not_too_long() -> None:
    words = " | ".join(f'"word{n}"' for n in range(2000))
    assert problem_of(Structure("lark", f"start: (WORD | N)+\nWORD: {words}\nN: /[0-9]+/")) is None
    assert problem_of(Structure("lark", doubled(10))) is None


@pytest.mark.parametrize(
    "rules",
    [
        'start: /%json/ "%json" # %json\n',
        "start: /a/ | </s> | " + '"word" | ' * 1000 + "/b/",
        'start: T r ["b"]\nT: "a"\nr[stop="]:"]: /x*/',
    ],
)
def test_words_are_parted_as_llguidance_parts_them(rules: str) -> None:
    assert problem_of(Structure("lark", rules)) is None


def test_patterns_of_several_lines_are_looked_at() -> None:
    rules = "start: /" + "abcdefghijkl?\n" * 400 + "/"
    assert "over 4096" in (problem_of(Structure("lark", rules)) or "")
