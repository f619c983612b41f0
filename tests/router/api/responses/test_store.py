"""Responses that are kept: bounded in number and bytes, the oldest go first, each its client's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.errors import HttpError
from router.api.responses.store import (
    BYTES_EACH,
    KeptResponse,
    KeptResponses,
    list_items,
    previous_id,
)


def kept(client: str = "anna", size: int = 10) -> KeptResponse:
    return KeptResponse(client, b"a" * size, b"[]")


def is_there(store: KeptResponses, name: str, client: str = "anna") -> bool:
    return store.get(client, name) is not None


def test_the_least_recently_used_go_first() -> None:
    store = KeptResponses(max_responses=2)
    for name in ("one", "two"):
        store.keep(name, kept())
    assert is_there(store, "one")
    store.keep("three", kept())
    assert [is_there(store, name) for name in ("one", "two", "three")] == [True, False, True]


def test_bytes_are_counted_with_what_an_entry_costs() -> None:
    each = kept(size=1000)
    assert each.size == 1002 + BYTES_EACH
    store = KeptResponses(max_bytes=2 * each.size)
    for name in ("one", "two", "three"):
        store.keep(name, each)
    assert (len(store), store.num_bytes) == (2, 2 * each.size)
    store.pop("anna", "two")
    assert store.num_bytes == each.size


def test_who_keeps_most_makes_room() -> None:
    """By number or by bytes, whichever of the two is the larger part of what may be kept."""
    store = KeptResponses(max_responses=10, max_bytes=100_000)
    store.keep("large", kept("ben", 20_000))
    for number in range(20):
        store.keep(f"small {number}", kept("anna"))
    assert is_there(store, "large", "ben")
    assert [n for n in range(20) if is_there(store, f"small {n}")] == list(range(11, 20))
    for number in range(8):
        store.keep(f"larger {number}", kept("ben", 30_000))
    assert all(is_there(store, f"small {n}") for n in range(13, 20))
    assert [n for n in range(8) if is_there(store, f"larger {n}", "ben")] == [6, 7]


def test_one_that_is_larger_than_all_may_be_pushes_nobody_out() -> None:
    store = KeptResponses(max_bytes=10 * kept().size)
    store.keep("small", kept())
    store.keep("large", kept(size=100_000))
    assert is_there(store, "small")
    assert not is_there(store, "large")


def test_nobody_reads_or_deletes_what_is_anothers() -> None:
    store = KeptResponses()
    store.keep("one", kept("anna"))
    assert not is_there(store, "one", "ben")
    assert not store.pop("ben", "one")
    assert is_there(store, "one", "anna")
    missing = store.missing("one")
    assert (missing.status, missing.code) == (404, "response_not_found")


def test_what_a_body_goes_on_from() -> None:
    for body, name in (
        (b'{"input": "a"}', None),
        (b'{"previous_response_id": "resp_1"}', "resp_1"),
        (b'{"previous\\u005fresponse_id": "resp_1"}', "resp_1"),
        (b'{"previous_response_id": 7}', None),
        (b"[" * 100_000, None),
        (b'{"previous_response_id": "\xff"}', None),
        (b"", None),
    ):
        assert previous_id(body) == name


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 4000)), max_size=40))
def test_the_limits_hold_whatever_is_kept(steps: list[tuple[str, int]]) -> None:
    store = KeptResponses(max_responses=4, max_bytes=8000)
    for number, (name, size) in enumerate(steps):
        if size % 5 == 0 and is_there(store, name):
            store.pop("anna", name)
        else:
            store.keep(f"{name}{number}", kept(size=size))
        assert len(store) <= 4
        assert store.num_bytes <= 8000
    assert (store.num_bytes == 0) == (len(store) == 0)


# The list of items.


ITEMS = KeptResponse("anna", b"", json.dumps([{"id": f"i{n}"} for n in range(25)]).encode())


def names(**query: str) -> tuple[list[str], bool]:
    page = json.loads(list_items(ITEMS, query))
    found = [item["id"] for item in page["data"]]
    assert (page["first_id"], page["last_id"]) == ((found[0], found[-1]) if found else ("", ""))
    return found, page["has_more"]


def test_items_come_in_pages() -> None:
    assert names() == ([f"i{n}" for n in range(24, 4, -1)], True)
    for limit in ("2", "000000002"):
        assert names(order="asc", limit=limit) == (["i0", "i1"], True)
    assert names(order="asc", after="i1", limit="2") == (["i2", "i3"], True)
    assert names(after="i3") == (["i2", "i1", "i0"], False)
    assert names(after="i0") == ([], False)


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "0"},
        {"limit": "101"},
        {"limit": "9" * 5000},
        {"limit": "-1"},
        {"limit": "٣"},
        {"order": "up"},
        {"after": "i99"},
    ],
)
def test_a_page_that_there_is_not(query: dict[str, Any]) -> None:
    with pytest.raises(HttpError) as caught:
        list_items(ITEMS, query)
    assert caught.value.param == next(iter(query))
