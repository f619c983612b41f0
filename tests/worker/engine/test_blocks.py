"""Blocks are conserved, and the prefix cache leads to the blocks of exactly these tokens."""

from collections.abc import Iterable
from struct import pack

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.worker.engine.windowed import windows_over
from wire.payloads import MAX_HASHES
from wire.prefix import prefix_hashes
from worker.compute.state_slots import StateSlots
from worker.engine.blocks import ROOT, BlockPool, Journal, root_of
from worker.engine.states import States

Tokens = tuple[int, int]


def keys_of(blocks: Iterable[Tokens]) -> list[bytes]:
    return [pack("<2I", *tokens) for tokens in blocks]


def register(pool: BlockPool, chain: list[Tokens], table: list[int], salt: str = "") -> None:
    prefix = root_of(salt)
    for key, block in zip(keys_of(chain), table, strict=False):
        prefix = pool.register(prefix, key, block)


A, B, C, D = (1, 2), (3, 4), (5, 6), (7, 8)


def test_a_shared_block_is_used_once_and_freed_by_the_last() -> None:
    pool = BlockPool(4, 2)
    first = pool.allocate(2)
    register(pool, [A, B], first)
    shared, prefix = pool.match_prefix(keys_of([A, B, C]))
    assert shared == first and prefix.hash == prefix_hashes([1, 2, 3, 4], 2)[-1]
    second = pool.allocate(1, shared)
    assert second[:2] == first and pool.num_used == 3
    pool.check([first, second])
    pool.free(first)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (3, 0, 1)
    pool.free(second)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 2, 2)
    pool.check([])


def test_the_least_recently_used_chain_goes_first_and_from_its_end() -> None:
    pool = BlockPool(4, 2)
    for chain in ([A, B], [C, D]):
        table = pool.allocate(2)
        register(pool, chain, table)
        pool.free(table)
    shared, _ = pool.match_prefix(keys_of([A, B]))
    pool.free(pool.allocate(0, shared))  # used again: now [C, D] is the oldest
    pool.allocate(1)
    assert len(pool.match_prefix(keys_of([C, D]))[0]) == 1
    pool.allocate(1)
    assert len(pool.match_prefix(keys_of([C, D]))[0]) == 0
    assert len(pool.match_prefix(keys_of([A, B]))[0]) == 2


def test_equal_hashes_do_not_make_equal_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that always collides, only the very same tokens are found."""
    monkeypatch.setattr("worker.tiers.keys.xxh3_64_intdigest", lambda *_: 42)
    pool = BlockPool(4, 2)
    table = pool.allocate(2)
    register(pool, [A, B], table)
    assert pool.match_prefix(keys_of([A, B]))[0] == table
    assert pool.match_prefix(keys_of([A, C]))[0] == table[:1]
    assert pool.match_prefix(keys_of([C, B]))[0] == []


def test_equal_hashes_do_not_make_equal_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.blocks.root_hash", lambda _: 0)
    pool = BlockPool(4, 2)
    tables = {salt: pool.allocate(2) for salt in ("", "a")}
    for salt, table in tables.items():
        register(pool, [A, B], table, salt)
    for salt, table in tables.items():
        assert pool.match_prefix(keys_of([A, B]), root=root_of(salt))[0] == table
    assert pool.match_prefix(keys_of([A, B]), root=root_of("b"))[0] == []


def test_a_cached_block_reports_the_hash_of_tokens_and_salt() -> None:
    pool = BlockPool(4, 2)
    register(pool, [A, B], pool.allocate(2), "ü")
    assert pool.journal.read() == (tuple(prefix_hashes([1, 2, 3, 4], 2, "ü")), {})


def test_ever_new_salts_leave_nothing_behind() -> None:
    pool = BlockPool(4, 2)
    for number in range(100):
        table = pool.allocate(2)
        register(pool, [A, B], table, f"salt {number}")
        pool.free(table)
    assert pool.num_cached == 4 == len(pool.journal)
    known = [it for it in vars(pool).values() if isinstance(it, dict)]
    assert max(map(len, known)) == 4


def test_without_a_prefix_cache_nothing_is_found_or_kept() -> None:
    pool = BlockPool(3, 2, enable_prefix_cache=False)
    table = pool.allocate(2)
    register(pool, [A, B], table)
    assert pool.match_prefix(keys_of([A, B])) == ([], ROOT)
    pool.free(table)
    assert pool.num_free == 3 and pool.journal.read() == ((), {})


def test_check_finds_a_leak_and_a_double_owner() -> None:
    pool = BlockPool(3, 2)
    table = pool.allocate(2)
    pool.check([table])
    with pytest.raises(AssertionError, match="2 blocks are used, 0 have an owner"):
        pool.check([])
    with pytest.raises(AssertionError, match="1 references, not 2"):
        pool.check([table, table])
    pool.free(pool.allocate(0, [2]))  # one that is free has no prefix to share
    with pytest.raises(AssertionError, match="2 free"):
        pool.check([table])


def test_the_journal_leaves_out_what_cancels_out() -> None:
    journal = Journal()
    journal.store(1)
    journal.store(2)
    journal.evict(2)
    assert journal.read() == ((1,), {})
    journal.evict(1)
    journal.store(1)
    assert journal.read() == ((), {})
    journal.evict(1)
    journal.evict(2, "disk")
    assert journal.read() == ((), {1: "kv_cache", 2: "disk"})


def test_the_journal_tells_a_bounded_number_at_a_time() -> None:
    journal = Journal()
    for prefix_hash in range(MAX_HASHES + 5):
        journal.store(prefix_hash)
    assert len(journal.read()[0]) == MAX_HASHES
    assert journal.read()[0] == tuple(range(MAX_HASHES, MAX_HASHES + 5))


@given(st.data())
def test_a_chain_is_shared_as_far_as_all_that_is_looked_at_is_there(data: st.DataObject) -> None:
    window = data.draw(st.none() | st.integers(1, 12))
    windows = None if window is None else windows_over(8, 3, [window])
    has_states = data.draw(st.booleans())
    kept = States(StateSlots(16, 3)) if has_states else None
    pool = BlockPool(8, 3, windows=windows, states=kept)
    lacking = data.draw(
        st.lists(st.sampled_from([0, 0, 1, 2, 3] if window else [0]), min_size=1, max_size=6)
    )
    states = [data.draw(st.booleans()) for _ in lacking]
    keys = [bytes([number]) for number in range(len(lacking))]
    table = pool.allocate(len(keys))
    for block, num_lacking in zip(table, lacking, strict=True):
        if windows is not None and num_lacking < 3:  # else there is nothing beside it
            windows.reach(block)
    prefixes = [ROOT]
    for key, block, num_lacking, has_state in zip(keys, table, lacking, states, strict=True):
        prefixes.append(
            pool.register(prefixes[-1], key, block, num_lacking=num_lacking, has_state=has_state)
        )
    there = {
        3 * index + offset
        for index, num_lacking in enumerate(lacking)
        for offset in range(num_lacking, 3)
    }
    next_token = data.draw(st.none() | st.integers(3 * len(keys), 3 * len(keys) + 9))

    def serves(num_blocks: int) -> bool:
        position = 3 * num_blocks if next_token is None else next_token
        first = 0 if window is None else max(0, position - window + 1)
        seen = set(range(first, 3 * num_blocks)) if window is not None else set()
        needs_state = has_states and position == 3 * num_blocks
        return seen <= there and (states[num_blocks - 1] or not needs_state)

    wanted = max((n for n in range(1, len(keys) + 1) if serves(n)), default=0)
    assert pool.match_prefix(keys, next_token) == (table[:wanted], prefixes[wanted])


class PoolMachine(RuleBasedStateMachine):
    """Chains over a tiny alphabet in a tiny pool: sharing, eviction and twins all happen.

    A block is only ever shared with the tokens and the salt that it was written for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 2)
        self.live: list[tuple[list[Tokens], list[int]]] = []
        # What was written into each block: the salt, and the tokens up to its end.
        self.content: dict[int, tuple[str, tuple[Tokens, ...]]] = {}
        self.told: set[int] = set()

    @rule(
        chain=st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=5),
        salt=st.sampled_from(["", "a", "b"]),
        full=st.booleans(),
    )
    def start(self, chain: list[Tokens], salt: str, full: bool) -> None:
        shared, prefix = self.pool.match_prefix(keys_of(chain), root=root_of(salt))
        for index, block in enumerate(shared):
            assert self.content[block] == (salt, tuple(chain[: index + 1])), "another's block"
        num_blocks = len(chain) - len(shared)
        if not self.pool.can_allocate(num_blocks, shared):
            assert num_blocks > self.pool.num_free
            return
        table = self.pool.allocate(num_blocks, shared)
        for index in range(len(shared), len(chain)):
            self.content[table[index]] = salt, tuple(chain[: index + 1])
            if full:
                prefix = self.pool.register(prefix, keys_of(chain)[index], table[index])
        if full:
            keys = keys_of(chain)
            assert len(self.pool.match_prefix(keys, root=root_of(salt))[0]) == len(chain)
        self.live.append((chain, table))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(min_value=0))
    def end(self, which: int) -> None:
        _, table = self.live.pop(which % len(self.live))
        self.pool.free(table)

    @rule()
    def beat(self) -> None:
        stored, evicted = self.pool.journal.read()
        assert not set(stored) & set(evicted)
        self.told = (self.told | set(stored)) - set(evicted)
        self.pool.republish()
        known, _ = self.pool.journal.read()
        assert self.told == set(known)

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.pool.check([table for _, table in self.live])
        self.pool.audit()
        assert self.pool.num_free + self.pool.num_used + self.pool.num_cached == 7


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, database=None)
TestPool = PoolMachine.TestCase
