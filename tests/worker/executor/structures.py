"""Structures over the demo model's tokens, their masks, and what a mask has to be."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from wire.options import Options, Structure
from wire.process.model import DEMO
from wire.process.structured_output import grammar_of, limits
from worker.executor.batch import Sampling
from worker.executor.grammars import Bits, Grammars, Masks
from worker.executor.structured_output import Structured

VOCAB, EOS = 1326, (0, 4)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
STRUCTURES = [
    Structure(kind="json_schema", text=json.dumps(PERSON)),
    Structure(kind="regex", text="[0-9]{2,4}(-[a-z]+)?"),
    Structure(kind="lark", text='start: "(" start ")" | /[xy]+/'),
]
PROMPT = [5, 6, 7]


@cache
def grammars() -> Grammars:
    return Grammars(DEMO / "tokenizer.json", VOCAB, EOS)


@cache
def tokenizer() -> LLTokenizer:
    text = (DEMO / "tokenizer.json").read_text()
    return LLTokenizer(text, n_vocab=VOCAB, eos_token=list(EOS))


def begun(structure: Structure) -> Structured:
    structured = grammars().structured(structure, len(PROMPT))
    structured.wait(60)
    assert structured.problem is None
    return structured


def asked(
    structured: Structured | None, answer: Sequence[int], drafts: Sequence[int] = (), **options: Any
) -> Sampling:
    token_ids = [*PROMPT, *answer]
    position = len(token_ids)
    return Sampling(
        *(1, Options(**options), position, len(PROMPT)),
        *(token_ids, None, tuple(drafts), structured),
    )


def masks_of(samplings: list[Sampling]) -> Masks:
    grammars().start(samplings)
    masks = grammars().take()
    assert masks is not None
    assert grammars().take() is None, "they are taken once"
    return masks


def mask_of(structured: Structured, answer: Sequence[int], drafts: Sequence[int] = ()) -> Bits:
    masks = masks_of([asked(structured, answer, drafts)])
    assert structured.problem is None
    return masks.bits


def allowed_in(row: Bits) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def allowed_by_force(structure: Structure, answer: list[int]) -> list[int]:
    matcher = LLMatcher(tokenizer(), grammar_of(structure), log_level=0, limits=limits())
    assert matcher.consume_tokens(answer)
    words = [t for t in range(VOCAB) if t not in EOS and matcher.validate_tokens([t])]
    return sorted([*words, *(EOS if matcher.is_accepting() else ())])


def walk(structure: Structure, seed: int, limit: int = 60) -> list[int]:
    """Draw an answer, any allowed token as likely as any other."""
    draw, structured, answer = random.Random(seed), begun(structure), list[int]()
    while len(answer) < limit:
        token_id = draw.choice(allowed_in(mask_of(structured, answer)[0]))
        if token_id in EOS:
            break
        answer.append(token_id)
    return answer
