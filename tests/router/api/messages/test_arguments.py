"""Arguments as an object, complete or cut short."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.messages.arguments import read_arguments

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_what_is_complete_is_read_as_it_is(value: dict[str, Any]) -> None:
    assert read_arguments(json.dumps(value)) == value


@given(st.dictionaries(st.text(), JSON, max_size=5), st.data(), st.sampled_from([None, 1]))
def test_what_is_cut_short_is_read_as_the_official_client_reads_it(
    value: dict[str, Any], data: st.DataObject, indent: int | None
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert read_arguments(cut) == jiter.from_json(cut.encode(), partial_mode=True)


@pytest.mark.parametrize(
    "text", ["", "x", "[1, 2", "7", '"a', "{'a': 1}", '{"a": 1,}', "}" * 9, "}{"]
)
def test_what_is_no_object_says_nothing(text: str) -> None:
    assert read_arguments(text) == {}


def test_depth_beyond_reading_says_nothing() -> None:
    assert read_arguments('{"a":' * 100_000) == {}


@given(st.text('{}[]",:\\ 1tru\n'))
def test_any_text_can_be_read(text: str) -> None:
    assert isinstance(read_arguments(text), dict)
