"""Answers as models write them, right and wrong: content and calls of every family, reasoning."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

MARKS: Final = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", "[THINK]", "[/THINK]"),
)
FRAGMENTS: Final = (
    *MARKS,
    *(mark[:-3] for mark in MARKS),
    *("{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ";", ":", "=", "<", " ", "\n", "\n\n"),
    *("\\n", '\\"', "\\u00e9", "é", "日本", "🎉", "null", "-1.5e3", "Let me see.", "get(", "x ="),
    *('{"name": ', '"arguments": ', '"parameters": {', '{"name": "get"}', "[text](link)"),
)
NAMES: Final = ("get", "look_up", "a.b-c", "f2")


def value(chance: random.Random, depth: int = 2) -> Any:
    kind = chance.randint(0, 6 if depth else 4)
    match kind:
        case 0:
            return chance.choice((None, True, False))
        case 1:
            return chance.choice((0, -7, 10**20, 1.5, -2e-9))
        case 2 | 3 | 4:
            return "".join(chance.choices(FRAGMENTS, k=chance.randint(0, 4)))
        case 5:
            return [value(chance, depth - 1) for _ in range(chance.randint(0, 3))]
    return {chance.choice(FRAGMENTS): value(chance, depth - 1) for _ in range(chance.randint(0, 3))}


def arguments(chance: random.Random) -> dict[str, Any]:
    return {key: value(chance) for key in ("a", "b_2", "é")[: chance.randint(0, 3)]}


def _object(chance: random.Random, key: str) -> str:
    call = [("name", chance.choice(NAMES)), (key, arguments(chance)), ("id", "abc")]
    chance.shuffle(call)
    indent = chance.choice((None, None, 1))
    return json.dumps(dict(call), indent=indent, ensure_ascii=chance.random() < 0.5)


def hermes(chance: random.Random) -> str:
    calls = [_object(chance, "arguments") for _ in range(chance.randint(1, 3))]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def llama(chance: random.Random) -> str:
    tag = chance.choice(("", "<|python_tag|>"))
    return tag + "; ".join(_object(chance, "parameters") for _ in range(chance.randint(1, 3)))


def mistral(chance: random.Random) -> str:
    calls = range(chance.randint(1, 3))
    if chance.random() < 0.5:
        return f"[TOOL_CALLS] [{', '.join(_object(chance, 'arguments') for _ in calls)}]"
    args = chance.choice(("[ARGS]", "", "[CALL_ID]abc123[ARGS]"))
    return "".join(
        f"[TOOL_CALLS]{chance.choice(NAMES)}{args}{json.dumps(arguments(chance))}" for _ in calls
    )


def pythonic(chance: random.Random) -> str:
    def call() -> str:
        pairs = arguments(chance).items()
        return f"{chance.choice(NAMES)}({', '.join(f'{key}={each!r}' for key, each in pairs)})"

    return f"[{', '.join(call() for _ in range(chance.randint(1, 3)))}]"


CALLS: Final[dict[str, Callable[[random.Random], str]]] = {
    "hermes": hermes,
    "llama3_json": llama,
    "mistral": mistral,
    "pythonic": pythonic,
}


def content(chance: random.Random) -> str:
    return "".join(chance.choices(FRAGMENTS, k=chance.randint(0, 3)))


def answers(family: str, chance: random.Random, num: int) -> Iterator[str]:
    """Content, calls and reasoning, whole or mangled."""
    calls = CALLS[family]
    for _ in range(num):
        thought = f"<think>\n{content(chance)}\n</think>\n\n"
        text = "".join(
            (
                chance.choice(("", "", "", thought, thought[7:], thought[:-10])),
                chance.choice(("", content(chance))),
                chance.choice(("", calls(chance), calls(chance))),
                chance.choice(("", content(chance), calls(chance))),
            )
        )
        yield mangled(text, chance)


def mangled(text: str, chance: random.Random) -> str:
    """The text as models get it wrong: cut short, or with something lost, doubled or added."""
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        begin = chance.randint(0, len(text))
        end = min(len(text), begin + chance.choice((0, 1, 1, 3, 12)))
        match chance.randint(0, 3):
            case 0:
                text = text[:begin]
            case 1:
                text = text[:begin] + text[end:]
            case 2:
                text = text[:end] + text[begin:]
            case _:
                text = text[:begin] + chance.choice(FRAGMENTS) + text[begin:]
    return text
