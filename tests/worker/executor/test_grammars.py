"""Masks say what the rows of a step may draw; a hostile structure ends by itself."""

from __future__ import annotations

import json
import random
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from tests.worker.executor.structures import (
    EOS,
    PROMPT,
    STRUCTURES,
    VOCAB,
    allowed_by_force,
    allowed_in,
    asked,
    begun,
    grammars,
    masks_of,
    tokenizer,
    walk,
)
from wire.options import Structure
from wire.process.model import DEMO
from wire.process.structured_output import StructureError, grammar_of
from worker.executor.grammars import Grammars
from worker.executor.structured_output import Structured


def test_rows_without_a_structure_cost_nothing() -> None:
    grammars().start([asked(None, []), asked(None, [5])])
    assert grammars().take() is None


def test_each_row_has_the_mask_of_its_own_text() -> None:
    answers = [walk(structure, 2) for structure in STRUCTURES]
    samplings = [asked(None, [])]
    texts = []
    for structure, answer in zip(STRUCTURES, answers, strict=True):
        for end in range(min(6, len(answer) - 2)):
            drafts = tuple(answer[end : end + end % 3])
            samplings += [asked(begun(structure), answer[:end], drafts), asked(None, [], drafts)]
            texts += [(structure, answer[: end + d]) for d in range(len(drafts) + 1)]
    masks = masks_of(samplings)
    start, rows = 0, list[int]()
    for it in samplings:
        if it.structured is not None:
            rows += range(start, start + 1 + len(it.drafts))
        start += 1 + len(it.drafts)
    for row, text in zip(rows, texts, strict=True):
        assert allowed_in(masks.bits[row]) == allowed_by_force(*text)
    assert (np.delete(masks.bits, rows, axis=0) == -1).all(), "the others may draw all tokens"


def test_eos_is_out_where_the_answer_may_go_on_but_not_end() -> None:
    structure = Structure(kind="regex", text="[xy]{1,2}")
    x = next(t for t in range(VOCAB) if t in allowed_by_force(structure, [])[:1])
    for options in ({"ignore_eos": True}, {"min_tokens": 5}):
        going = masks_of([asked(begun(structure), [x], **options)])
        assert not set(EOS) & set(allowed_in(going.bits[0])) and not going.over
        over = masks_of([asked(begun(structure), [x, x], **options)])
        assert set(allowed_in(over.bits[0])) == set(EOS) and over.over == [0]
    assert set(EOS) < set(allowed_in(masks_of([asked(begun(structure), [x])]).bits[0]))
    longer = begun(Structure(kind="regex", text="[xy]{1,4}"))
    rows = masks_of([asked(longer, [x], [x, x], min_tokens=3)]).bits
    assert [set(EOS) <= set(allowed_in(row)) for row in rows] == [False, False, True]


@pytest.mark.parametrize("why", ["no file", "no tokenizer", "no EOS"])
def test_a_model_that_cannot_says_so(tmp_path: Path, why: str) -> None:
    path = tmp_path / "tokenizer.json"
    if why != "no file":
        path.write_text("{}" if why == "no tokenizer" else (DEMO / path.name).read_text())
    model = Grammars(path, VOCAB, () if why == "no EOS" else EOS)
    structured = model.structured(STRUCTURES[0], 3)
    structured.wait(60)
    assert structured.problem is not None and str(tmp_path) not in structured.problem
    model.shutdown()


class Compiling:
    """Grammars that are compiled; those with "slow" in them wait until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = Grammars(DEMO / "tokenizer.json", VOCAB, EOS)
        self.compiled: list[str] = []
        self.may_go_on, self._begun = threading.Event(), threading.Semaphore(0)
        monkeypatch.setattr("worker.executor.grammars.grammar_of", self._grammar_of)

    def _grammar_of(self, structure: Structure) -> str:
        self.compiled.append(structure.text)
        if "slow" in structure.text:
            self._begun.release()
            assert self.may_go_on.wait(60)
        return grammar_of(structure)

    def have_begun(self, count: int) -> None:
        for _ in range(count):
            assert self._begun.acquire(timeout=60)

    def structured(self, text: str, tenant: int, salt: str = "") -> Structured:
        return self.model.structured(Structure("regex", text), 0, tenant, salt)

    def compile(self, text: str, tenant: int, salt: str = "") -> None:
        structured = self.structured(text, tenant, salt)
        structured.wait(60)
        assert structured.is_ready and structured.problem is None


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    compiling = Compiling(monkeypatch)
    yield compiling
    compiling.may_go_on.set()
    compiling.model.shutdown()


def test_new_structures_of_a_tenant_do_not_keep_those_of_another_waiting(
    compiling: Compiling,
) -> None:
    kept = [compiling.structured(f"slow{number}", 1) for number in range(20)]
    compiling.have_begun(2)
    compiling.compile("[0-9]", 2)
    compiling.compile("[a-z]", 3)
    assert not any(each.is_ready for each in kept)


def test_a_compiled_structure_is_reused_for_its_salt_only(compiling: Compiling) -> None:
    for tenant, salt in ((1, "a"), (2, "a"), (2, "b"), (2, ""), (1, "b")):
        compiling.compile("[0-9]", tenant, salt)
    assert len(compiling.compiled) == 3


def deep(num_levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(num_levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def bomb(how: str) -> dict[str, Any]:
    """A schema whose text doubles 40 times, if one follows its references."""
    both = [{"$ref": f"#/$defs/d{n + 1}"} for n in range(40)]
    ends: dict[str, Any] = {"d40": {"type": "string"}}
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{n}": {how: [both[n]] * 2} for n in range(40)} | ends,
    }


LETTERS = "abcdefghijklmnopqrstuvwxyz"
HOSTILE: dict[str, tuple[str, object]] = {
    "deep": ("json_schema", deep(60)),
    "wide": ("json_schema", {"properties": {f"p{n}": {"maxLength": n} for n in range(1000)}}),
    "anyOf bomb": ("json_schema", bomb("anyOf")),
    "itself": ("json_schema", {"$ref": "#"}),
    "many items": ("json_schema", {"type": "array", "minItems": 10**6, "maxItems": 10**6}),
    "large enum": ("json_schema", {"enum": [f"v{n}" for n in range(6000)]}),
    "nested repetitions": ("regex", "((a{1,100}){1,100}){1,100}"),
    "exponential": ("regex", "(.*a.{30}){5}"),
    "alternatives": ("regex", "|".join(f".*{n}x{n}" for n in range(3000))),
    "classes": ("regex", ".*".join(f"[^{c}]{{3,9}}" for c in LETTERS)),
    "ambiguous": ("lark", 'start: start start start | start start | "a" | '),
    "repeated rules": ("lark", 'start: a{1000}\na: b{1000}\nb: "x"{1000}'),
    "many rules": (
        "lark",
        "start: r0\n"
        + "\n".join(f'r{n}: r{n + 1} r{n + 1} | "x"' for n in range(2000))
        + '\nr2000: "y"',
    ),
    "intersection": (
        "lark",
        "start: T\nT: " + " & ".join(f"/(.|\\n)*{c}(.|\\n)*/" for c in LETTERS),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_structure_ends_by_itself(name: str) -> None:
    """It is refused or followed, within the limits of time and memory."""
    kind, text = HOSTILE[name]
    text = text if isinstance(text, str) else json.dumps(text)
    structured = grammars().structured(Structure(kind=kind, text=text), len(PROMPT))  # type: ignore[arg-type]
    structured.wait(60)
    assert structured.is_ready
    draw, answer = random.Random(1), list[int]()
    while structured.problem is None and len(answer) < 50:
        masks = masks_of([asked(structured, answer)])
        if structured.problem is None:
            answer.append(draw.choice(allowed_in(masks.bits[0])))
            if answer[-1] in EOS:
                break


def test_a_step_waits_once_for_masks_that_take_twice_its_time_and_never_for_cheap_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of masks only the time on a core counts, not that in which others are on it.
    monkeypatch.setattr("time.perf_counter", time.thread_time)
    # Every pair of letters may be split in two ways: each letter makes the next mask dearer.
    ambiguous = Structure(kind="lark", text='start: s\ns: s s | /[a-z ]/ | ""')
    cheap = Structure(kind="regex", text="[a-z ]+")
    forward_s = 0.0
    following = Grammars(DEMO / "tokenizer.json", VOCAB, EOS, clock=lambda: forward_s)
    letters = [int(it) for it in tokenizer().tokenize_str("the girl saw a cat " * 20)]
    slow, quick = following.structured(ambiguous, 3), following.structured(cheap, 3)
    slow.wait(60)
    quick.wait(60)
    num_letters = 0
    while not slow.is_slow:
        assert slow.problem is None, "a mask took 2 ms long before it is given up"
        num_letters += 1
        following.start([asked(it, letters[:num_letters]) for it in (slow, quick)])
        assert following.take() is not None
        assert not quick.is_slow
    following.start([asked(slow, letters[:num_letters])])
    forward_s = 60.0
    assert following.take() is not None
    assert not slow.is_slow, "a step that takes longer than the mask waits for nothing"
    following.shutdown()


class HeldUp(list[int]):
    """Tokens that say when a mask is begun after them; then it waits until it may go on."""

    def __init__(self, name: str, order: list[str], may_go_on: threading.Event) -> None:
        super().__init__(PROMPT)
        self.name, self._order, self._may_go_on = name, order, may_go_on

    def __getitem__(self, index: Any) -> Any:
        assert threading.current_thread().name.startswith("background")
        self._order.append(self.name)
        assert self._may_go_on.wait(60)
        return super().__getitem__(index)


def test_slow_masks_are_made_in_the_background_tenants_in_turn() -> None:
    order, may_go_on = list[str](), threading.Event()
    model = Grammars(DEMO / "tokenizer.json", VOCAB, EOS)
    first = model.structured(STRUCTURES[0], len(PROMPT), tenant=1)
    first.wait(60)
    choices = [first, *(first.begin(len(PROMPT)) for _ in range(3))]
    other = model.structured(STRUCTURES[0], len(PROMPT), tenant=2)
    for number, structured in enumerate([*choices, other]):
        structured.make_mask(HeldUp("aaaab"[number], order, may_go_on))
    may_go_on.set()
    for structured in (*choices, other):
        structured.wait(60)
        assert structured.is_ready
    assert "".join(order) == "abaaa"
    model.shutdown()


def test_failed_grammars_are_not_kept_in_memory() -> None:
    structured = grammars().structured(Structure(kind="json_schema", text='{"$ref": "#"}'), 0)
    structured.wait(60)
    with pytest.raises(StructureError) as failed:
        _ = structured.eos
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(failed.value.__traceback__)]
    assert not [value for names in frames for value in names.values() if type(value) is LLMatcher]
