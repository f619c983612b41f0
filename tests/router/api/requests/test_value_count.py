"""Values of a body are counted, exactly, before it is decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api import chat, text
from router.api.errors import HttpError
from router.api.requests.value_count import (
    MAX_NUMBERS,
    MAX_OBJECTS,
    Values,
    check_values,
    count_values,
)
from router.api.tokenize import detokenize, tokenize
from tests.router.api.asking import CONTEXT, letters

TEXTS = st.text(alphabet='"\\,[{é a')
DOCUMENTS = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> Values:
    if isinstance(value, str):
        return Values(1, 0)
    if not isinstance(value, list | dict):
        return Values(0, 0)
    inner = list(value) if isinstance(value, list) else [*value.values()]
    keys = len(value) if isinstance(value, dict) else 0
    each = [counted(item) for item in inner]
    return Values(
        1 + keys + sum(item.objects for item in each),
        max(len(value) - 1, 0) + sum(item.commas for item in each),
    )


@given(DOCUMENTS, st.integers(1, 9), st.booleans())
def test_the_count_is_exact_wherever_a_step_ends(
    document: Any,
    step: int,
    escaped: bool,
) -> None:
    raw = json.dumps(document, ensure_ascii=escaped).encode()
    assert count_values(raw, step) == counted(document)


@pytest.mark.parametrize("one", [b"[", b'"",', b"1,", b'""{'])
def test_the_count_stops_just_over_a_limit(one: bytes) -> None:
    step = 3000
    counted = count_values(one * 2 * max(MAX_OBJECTS, MAX_NUMBERS), step)
    assert counted.objects <= MAX_OBJECTS + step and counted.commas <= MAX_NUMBERS + step
    assert counted.objects > MAX_OBJECTS or counted.commas > MAX_NUMBERS


@pytest.mark.parametrize("one", [b"[]", b"{}", b'""', b'{"a":1}'])
def test_objects_have_a_limit(one: bytes) -> None:
    raw = b"[" + b",".join([one] * (MAX_OBJECTS + 1)) + b"]"
    with pytest.raises(HttpError, match="strings, arrays and objects") as caught:
        check_values(raw)
    assert (caught.value.status, caught.value.code) == (413, "too_many_values")


def test_numbers_have_a_limit_and_exactly_it_is_let_in() -> None:
    check_values(b"[" + b",".join([b"1"] * (MAX_NUMBERS + 1)) + b"]")
    with pytest.raises(HttpError, match="values"):
        check_values(b"[" + b",".join([b"1"] * (MAX_NUMBERS + 2)) + b"]")


def test_a_body_of_too_many_values_is_not_decoded(tmp_path: Path) -> None:
    model = letters(tmp_path)
    body = b'{"prompt": 7, "tools": [' + b",".join([b"[]"] * 200_000) + b"]}"
    for read in (text.read, chat.read):
        with pytest.raises(HttpError, match="strings, arrays and objects"):
            read(model, body, CONTEXT)
    with pytest.raises(HttpError, match="strings, arrays and objects"):
        tokenize(model, body, 100)
    with pytest.raises(HttpError, match="over 262144 values"):
        detokenize(model, b'{"tokens": [' + b",".join([b"1"] * 300_000) + b"]}")
