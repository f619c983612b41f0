"""The chain of block hashes."""

from __future__ import annotations

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from wire.prefix import prefix_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_each_hash_is_seeded_by_the_one_before() -> None:
    first = xxh3_64_intdigest(pack("<2I", 1, 2), seed=0)
    second = xxh3_64_intdigest(pack("<2I", 3, 2**32 - 1), seed=first)
    assert prefix_hashes([1, 2, 3, 2**32 - 1, 5], 2) == [first, second]


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_a_longer_prompt_keeps_the_hashes_of_its_prefix(
    head: list[int], tail: list[int], block_size: int
) -> None:
    hashes = prefix_hashes(head, block_size)
    assert prefix_hashes(head + tail, block_size)[: len(hashes)] == hashes
    assert all(0 <= block_hash < 2**64 for block_hash in hashes)


@given(TOKENS.filter(len), st.data())
def test_a_changed_token_changes_every_hash_from_its_block_on(
    tokens: list[int], data: st.DataObject
) -> None:
    block_size = data.draw(st.integers(1, 4))
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = prefix_hashes(tokens, block_size), prefix_hashes(changed, block_size)
    assert before[: at // block_size] == after[: at // block_size]
    assert all(
        one != other
        for one, other in zip(before[at // block_size :], after[at // block_size :], strict=True)
    )


@given(TOKENS, st.integers(1, 4), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_a_salt_changes_every_hash(tokens: list[int], block_size: int, salt: str) -> None:
    plain, salted = prefix_hashes(tokens, block_size), prefix_hashes(tokens, block_size, salt)
    assert len(plain) == len(salted) and not set(plain) & set(salted)
    assert prefix_hashes(tokens, block_size, salt) == salted != [*plain, 0]
    assert root_hash("") == 0 != root_hash(salt)


@pytest.mark.parametrize(
    ("tokens", "block_size", "reason"),
    [([1], 0, "block_size"), ([-1], 1, "u32"), ([2**32], 1, "u32")],
)
def test_an_invalid_block_size_or_token_id_is_refused(
    tokens: list[int], block_size: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        prefix_hashes(tokens, block_size)
