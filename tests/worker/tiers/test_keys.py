"""A key names a chain of tokens: equal chains have equal keys, in every process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wire.prefix import prefix_hashes
from worker.engine.blocks import ROOT, root_of
from worker.tiers.keys import BlockKey, Chain, digest_of, follow

Blocks = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=4)


def chain_of(blocks: list[list[int]], root: Chain = ROOT) -> BlockKey:
    chain = root
    for block in blocks:
        chain = key = follow(chain, b"".join(it.to_bytes(4, "little") for it in block))
    return key


@given(Blocks, Blocks)
def test_chains_are_equal_if_their_tokens_are(one: list[list[int]], other: list[list[int]]) -> None:
    assert (chain_of(one).digest == chain_of(other).digest) == (one == other)


@given(Blocks)
def test_a_key_has_the_hash_that_routers_know(blocks: list[list[int]]) -> None:
    key = chain_of(blocks)
    assert key.hash == prefix_hashes([it for block in blocks for it in block], 2)[-1]
    assert key.length == len(blocks) and key.digest == digest_of(key.parent, key.tokens)


@given(st.text(max_size=3), st.text(max_size=3), Blocks)
def test_no_chain_is_that_of_another_salt(one: str, other: str, blocks: list[list[int]]) -> None:
    keys = [chain_of(blocks, root_of(salt)) for salt in (one, other)]
    assert (keys[0].digest == keys[1].digest) == (one == other)
    assert keys[0].hash == prefix_hashes([it for block in blocks for it in block], 2, one)[-1]
