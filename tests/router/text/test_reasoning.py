"""Reasoning: where it begins and ends, and which marks a template speaks of."""

from __future__ import annotations

import pytest

from router.text.output_parts import Content, Part, Reasoning
from router.text.reasoning import FAMILIES, detect, read_reasoning
from router.text.scan import AnswerReader, Scan, Steps
from tests.router.text.reading import read_pieces

THINK = FAMILIES["qwen3"]


def read(text: str, *, is_open: bool = False) -> list[Part]:
    def steps(scan: Scan) -> Steps[None]:
        yield from read_reasoning(scan, THINK, is_open=is_open)
        yield from scan.until()

    return read_pieces(AnswerReader(steps), [text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nso\n</think>\n\nyes", [Reasoning("so"), Content("yes")]),
        ("\n<think>so</think>yes\n", [Reasoning("so"), Content("yes\n")]),
        ("<think>\n\n</think>\n\nyes", [Content("yes")]),
        ("<think>so it is", [Reasoning("so it is")]),
        ("<think>so </thin", [Reasoning("so </thin")]),
        ("<think>a </think b</think>c", [Reasoning("a </think b"), Content("c")]),
        # Not at the beginning, or not the mark.
        (" yes <think>so</think>", [Content(" yes <think>so</think>")]),
        ("<thin ice", [Content("<thin ice")]),
        ("<think", [Content("<think")]),
        ("no</think>", [Content("no</think>")]),
        ("", []),
    ],
)
def test_reasoning_begins_the_answer(text: str, expected: list[Part]) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so\n</think>\n\nyes", [Reasoning("so"), Content("yes")]),
        ("</think>yes", [Content("yes")]),
        ("<think>so</think>yes", [Reasoning("so"), Content("yes")]),
        ("<th</think>yes", [Reasoning("<th"), Content("yes")]),
        ("so it is", [Reasoning("so it is")]),
    ],
)
def test_an_answer_may_begin_inside(text: str, expected: list[Part]) -> None:
    assert read(text, is_open=True) == expected


def test_the_prompt_says_whether_it_begins_inside() -> None:
    assert THINK.left_open("<|assistant|><think>\n")
    assert not THINK.left_open("<|user|>what is <think>?<|assistant|>")
    assert not THINK.left_open("<|assistant|><think>\n\n</think>\n\n")
    assert THINK.left_open("<|assistant|><think>I am", "<think>I am")
    assert not THINK.left_open("<|assistant|><think>I am</think>So", "<think>I am</think>So")
    always = FAMILIES["deepseek_r1"]
    assert always.left_open("<|Assistant|>")
    assert not always.left_open("<|Assistant|><think>\n</think>\n")


def test_the_template_says_which_marks() -> None:
    assert detect("{{ content.split('</think>')[-1] }}") == THINK
    assert detect("{{ '[THINK]' ~ thought ~ '[/THINK]' }}") == FAMILIES["mistral"]
    assert detect("<seed:think></seed:think>") == FAMILIES["seed_oss"]
    assert detect("{{ messages }}") is None
