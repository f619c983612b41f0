"""The longest common prefix of prompts, against a plain search."""

from __future__ import annotations

from struct import Struct

from hypothesis import given
from hypothesis import strategies as st

from router.core.history.chains import BYTES_EACH, Chains
from router.core.history.record import Record

TOKENS = st.lists(st.sampled_from([1, 2, 256, 1 << 24]), max_size=12)


def chain(token_ids: list[int]) -> bytes:
    return Struct(f"<{len(token_ids)}I").pack(*token_ids)


def record(number: int, client: str = "anna", num_tokens: int = 1, salt: str = "") -> Record:
    return Record(number, f"r{number}", client, salt, num_tokens, 0.0, None)


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(st.lists(TOKENS, max_size=12), TOKENS, st.integers(0, 3))
def test_the_nearest_chain_has_the_longest_common_prefix(
    earlier: list[list[int]], prompt: list[int], num_removed: int
) -> None:
    chains, records = Chains(1 << 20), list[Record]()
    for number, token_ids in enumerate(earlier):
        records.append(record(number, num_tokens=len(token_ids)))
        chains.add(records[-1], chain(token_ids))
    for each in records[:num_removed]:
        chains.drop(each)
    left = earlier[num_removed:]
    found = chains.nearest("anna", chain(prompt), "")
    assert chains.nearest("ben", chain(prompt), "") is None
    if not left:
        assert found is None and chains.num_bytes == 0
        return
    assert found is not None
    best = max(common(prompt, each) for each in left)
    assert found.tokens == found.usable == best
    assert common(prompt, earlier[found.earlier.number]) == best


def test_of_equal_chains_the_latest_with_the_same_salt_is_preferred() -> None:
    chains = Chains(1 << 20)
    for number, salt in enumerate(["a", "b", "b", "c"]):
        chains.add(record(number, salt=salt), chain([1, 2, 3]))
    for salt, earlier, is_other in (("a", "r0", False), ("b", "r2", False), ("d", "r3", True)):
        found = chains.nearest("anna", chain([1, 2, 3]), salt)
        assert found is not None
        assert (found.earlier.name, found.earlier.salt != salt) == (earlier, is_other)


def test_an_answer_counts_without_its_last_token() -> None:
    chains, it = Chains(1 << 20), record(0, num_tokens=3)
    chains.add(it, chain([1, 2, 3]))
    chains.extend(it, chain([4, 5]))
    found = chains.nearest("anna", chain([1, 2, 3, 4, 5, 6]), "")
    assert found is not None
    assert (found.tokens, found.usable, found.is_whole) == (5, 4, True)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 200)), max_size=60))
def test_bytes_are_bounded_and_counted(added: list[tuple[str, int]]) -> None:
    most = 4 * (BYTES_EACH + 200)
    chains, records = Chains(most), list[Record]()
    for number, (client, size) in enumerate(added):
        records.append(record(number, client))
        chains.add(records[-1], bytes(4 * size))
        kept = [each for each in records if each.chain is not None]
        assert chains.num_bytes == sum(each.size + BYTES_EACH for each in kept) <= most
    for each in records:
        chains.drop(each)
    assert chains.num_bytes == 0
    assert all(chains.nearest(client, b"", "") is None for client in "abc")


def test_a_client_that_asks_much_loses_its_own_chains() -> None:
    size = 400
    chains = Chains(10 * (size + BYTES_EACH))
    quiet = record(0, "quiet")
    chains.add(quiet, bytes(size))
    loud = [record(number, "loud") for number in range(1, 100)]
    for each in loud:
        chains.add(each, bytes(size))
    assert quiet.chain is not None
    assert [each.number for each in loud if each.chain is not None] == list(range(91, 100))
