"""Layers with a window keep what it reaches, and no more, whatever becomes of a sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from msgspec import structs

from tests.oracle import oracle
from tests.worker.engine.hashed import of_kind, text
from tests.worker.engine.windowed import windows_over
from wire.layout import KVLayout
from wire.options import Options
from wire.transfer import plan
from worker.engine.engine import Engine
from worker.engine.outputs import Failed, Output, Reserved, Started
from worker.engine.sequence import Sequence
from worker.engine.windows import Windows, table_of, unpack, windows_of
from worker.executor.batch import Batch
from worker.executor.contract import SampledToken, SequenceFailed, blocks_of_window
from worker.executor.hash import MIXED, HashExecutor, HashKVCache, create_mixed

BLOCK_SIZE, CHUNK, WINDOW = 4, 16, 13
# Without states, so that there may be drafts.
WINDOWED = KVLayout(groups=MIXED.groups[:2])
_, WIDE, _ = MIXED.groups
TWO = KVLayout(groups=(structs.replace(WIDE, window=5), WIDE))
ONLY = KVLayout(groups=(structs.replace(MIXED.groups[1], num_layers=2),))
ENDLESS = Options(ignore_eos=True)
# What a window of 13 and the next token may reach in blocks of 4, and what a step does.
MOST = blocks_of_window(WINDOW, BLOCK_SIZE)
OF_STEP = CHUNK // BLOCK_SIZE


def executor_of(layout: KVLayout = WINDOWED) -> HashExecutor:
    return HashExecutor(replace(create_mixed().info, layout=layout))


def engine_of(
    num_window_blocks: int, executor: HashExecutor | None = None, **settings: Any
) -> Engine:
    chosen = {"num_blocks": 200, "block_size": BLOCK_SIZE, "max_ubatch_tokens": CHUNK} | settings
    return Engine(executor or executor_of(), num_window_blocks=num_window_blocks, **chosen)


def windows_in(engine: Engine) -> Windows:
    assert engine.pool.windows is not None
    return engine.pool.windows


class Peak:
    """Steps an engine to its end and looks how many blocks were reached at once."""

    def __init__(self) -> None:
        self.used = 0

    def run(self, engine: Engine, max_steps: int = 3000) -> list[Output]:
        windows, outputs = windows_in(engine), list[Output]()
        reach, highest = windows.reach, 0

        def watched(block: int) -> None:
            nonlocal highest
            reach(block)
            highest = max(highest, windows.num_used)

        windows.reach = watched  # type: ignore[method-assign]
        for _ in range(max_steps):
            if not engine.has_work():
                break
            outputs += engine.step()
            engine.check()
            engine.pool.audit()
        windows.reach = reach  # type: ignore[method-assign]
        self.used = highest
        assert not engine.has_work()
        return outputs


def run(engine: Engine) -> list[Output]:
    return Peak().run(engine)


def test_a_sequence_far_longer_than_the_window_peaks_at_what_it_reaches() -> None:
    engine, peak, prompt = engine_of(60), Peak(), list(range(10, 310))
    engine.add(Sequence(1, prompt, ENDLESS, 100))
    told = text(peak.run(engine), 1)
    assert told == oracle(prompt, 100, ENDLESS, layout=WINDOWED)
    assert peak.used <= -(-(WINDOW - 1 + CHUNK) // BLOCK_SIZE) + 1
    assert windows_in(engine).num_used == 0
    engine = engine_of(60, prefix_cache=False)
    engine.add(Sequence(1, prompt, ENDLESS, 100))
    engine.step()
    while engine.has_work():
        engine.step()
        held = 60 - windows_in(engine).num_free
        assert held == windows_in(engine).num_used < MOST, "between two steps only the window"
    assert windows_in(engine).num_free == 60


def test_a_prefix_is_shared_where_what_its_window_reaches_is_still_there() -> None:
    engine, prompt = engine_of(MOST + OF_STEP), list(range(10, 42))
    engine.add(Sequence(1, prompt, ENDLESS, 1))
    run(engine)
    engine.add(Sequence(2, [*prompt, 3, 4], ENDLESS, 3))
    outputs = run(engine)
    assert of_kind(outputs, Started)[0].cached_tokens == 32
    assert text(outputs, 2) == oracle([*prompt, 3, 4], 3, ENDLESS, layout=WINDOWED)
    engine.add(Sequence(3, range(1000, 1100), ENDLESS, 1))
    run(engine)
    assert engine.pool.num_cached > 30 and windows_in(engine).num_free == 0
    engine.add(Sequence(4, [*prompt, 5], ENDLESS, 5))
    outputs = run(engine)
    assert of_kind(outputs, Started)[0].cached_tokens == 0, "another has taken it"
    assert text(outputs, 4) == oracle([*prompt, 5], 5, ENDLESS, layout=WINDOWED)


def texts_of(draw: random.Random) -> dict[int, list[int]]:
    words = [draw.choices(range(10, 99), k=draw.randint(5, 30)) for _ in range(4)]
    return {
        number: [token for word in draw.choices(words, k=draw.randint(1, 4)) for token in word]
        for number in range(10)
    }


@pytest.mark.parametrize(
    "layout", [WINDOWED, MIXED, ONLY, TWO], ids=["windowed", "mixed", "only", "two"]
)
@pytest.mark.parametrize("seed", range(6))
def test_texts_are_the_same_however_few_there_are(layout: KVLayout, seed: int) -> None:
    """In chunks, preempted, swapped, with drafts and with prefixes that are there or have gone."""
    draw = random.Random(seed)
    prompts = texts_of(draw)
    engine = engine_of(
        draw.choice([MOST, MOST + 1, 2 * MOST, 3 * MOST]) + OF_STEP,
        executor_of(layout),
        num_blocks=draw.choice([40, 45, 60]),
        swap_bytes=draw.choice([0, 1 << 12, 1 << 20]),
        speculate=draw.choice([None, "ngram:4"]),
        prefix_cache=draw.random() < 0.8,
    )
    engine.swap.costs.copy_bytes_per_s = 1e15
    for number, prompt in prompts.items():
        engine.add(Sequence(number, prompt, ENDLESS, 30))
    peak = Peak()
    outputs = peak.run(engine)
    for number, prompt in prompts.items():
        assert text(outputs, number) == oracle(prompt, 30, ENDLESS, layout=layout)
    assert peak.used <= windows_in(engine).blocks.num_blocks
    assert windows_in(engine).num_used == 0


def carried(ids: Iterator[int], prefill: Engine, decode: Engine, prompt: list[int]) -> list[int]:
    """Read a prompt in one engine and generate in the other; return what was told."""
    number = next(ids)
    prefill.add(Sequence(number, prompt, ENDLESS, 3, transfer=True))
    outputs = run(prefill)
    (first,), (started,) = text(outputs, number), of_kind(outputs, Started)
    decode.reserve(number, prompt)
    (reserved,) = of_kind(run(decode), Reserved)
    for rectangle in plan(decode.cache.layout, reserved.cached_tokens, len(prompt), 1 << 8):
        table = table_of(prefill.cache, rectangle.group, started.block_table)
        kv = prefill.cache.pack(table, rectangle)
        unpack(decode.cache, reserved.block_table, rectangle, kv, len(prompt))
    prefill.release(number)
    decode.begin_decode(number, [*prompt, first], ENDLESS, 20)
    return [first, *text(run(decode), number)]


@pytest.mark.parametrize("layout", [WINDOWED, MIXED, TWO], ids=["windowed", "mixed", "two"])
@pytest.mark.parametrize("seed", range(3))
def test_window_kv_is_transferred_between_workers(layout: KVLayout, seed: int) -> None:
    draw, ids = random.Random(seed), count()
    sizes = [MOST + OF_STEP, 3 * MOST + OF_STEP, 60]
    prefill, decode = (
        engine_of(draw.choice(sizes), executor_of(layout), block_size=BLOCK_SIZE) for _ in range(2)
    )
    for cache in (prefill.cache, decode.cache):
        assert isinstance(cache, HashKVCache)
        cache.kv[:] = cache.window_kv[:] = 255
    for prompt in texts_of(draw).values():
        for _ in range(2):
            told = carried(ids, prefill, decode, prompt)
            assert told == oracle(prompt, 21, ENDLESS, layout=layout)
    assert decode.stats().counters.cached_tokens > 0
    for engine in (prefill, decode):
        engine.check()
        assert windows_in(engine).num_used == 0


def test_too_few_for_one_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a window of 13 and steps of 16 tokens need 9"):
        engine_of(MOST + OF_STEP - 1)
    assert windows_of(HashKVCache(8, 4, WINDOWED), 16) is None, "each has one for ever"
    assert windows_of(HashKVCache(8, 4), 16) is None


def test_the_largest_window_looks_back_and_the_smallest_lacks_most() -> None:
    windows = windows_over(4, 2, (3, 6))
    assert (windows.first_seen(9), windows.whole_from(9)) == (4, 7)
    assert windows.first_seen(2) == windows.whole_from(2) == 0


def test_unreached_window_blocks_are_cached_and_evicted_by_age() -> None:
    windows = windows_over(9, 2, [2], num_window_blocks=3)
    for block in (4, 7, 1):
        windows.reach(block)
    windows.reach(4)
    windows.leave(4, is_known=True)
    assert windows.num_used == 3, "another reaches it"
    windows.leave(7, is_known=True)
    windows.leave(4, is_known=True)
    windows.leave(1, is_known=False)
    assert (windows.num_used, windows.num_cached, windows.num_free) == (0, 2, 1)
    for block in (8, 3):
        windows.reach(block)
    assert windows.is_there(4) and not windows.is_there(7)
    windows.drop(4)
    windows.drop(4)
    windows.drop(8)
    assert not windows.is_there(4) and windows.is_there(8)
    windows.check([[8, 3]], [])
    with pytest.raises(AssertionError, match="are used"):
        windows.check([[8]], [])
    with pytest.raises(AssertionError, match="0 promised, not 2"):
        windows.check([[8, 3]], [2])
    with pytest.raises(AssertionError, match="reach it"):
        windows.check([[8, 3], [3]], [])


def test_a_step_that_came_to_nothing_reaches_no_further_than_before() -> None:
    class Failing(HashExecutor):
        def sample(self, logits: list[int], batch: Batch) -> list[SampledToken]:
            if len(batch.context_lens) > 1:
                raise SequenceFailed(0, "no more")
            return super().sample(logits, batch)

    engine = engine_of(60, Failing(executor_of().info))
    engine.add(Sequence(1, range(10, 14), ENDLESS, 40))
    engine.step()
    engine.add(Sequence(2, range(100, 180), ENDLESS, 3))
    assert of_kind(engine.step(), Failed)
    assert windows_in(engine).num_used == 0, "the second has read nothing yet"
    engine.check()
    assert text(run(engine), 2) == oracle(range(100, 180), 3, ENDLESS, layout=WINDOWED)


TABLE = [5, 2, 7, 0]


def stale(block_size: int) -> HashKVCache:
    cache = HashKVCache(8, block_size, MIXED, 4)
    cache.kv[:] = cache.window_kv[:] = 255
    return cache


@pytest.mark.parametrize("segment_bytes", [16 * 2, 1 << 20], ids=["token by token", "at once"])
def test_slots_before_the_window_are_zeroed(segment_bytes: int) -> None:
    cache, num_tokens = stale(8), 29
    for rectangle in plan(MIXED, 0, num_tokens, segment_bytes):
        unpack(cache, TABLE, rectangle, b"\7" * rectangle.num_bytes(MIXED), num_tokens)
    first = num_tokens - WINDOW + 1  # 17: the second token of the third block
    assert first % 8 == 1
    assert (cache.kv[[5, 2, 7], 0] == 7).all() and (cache.kv[0, 0, :, :, :5] == 7).all()
    windowed = cache.window_kv
    assert (windowed[[5, 2]] == 255).all(), "whole blocks are not looked at"
    assert (windowed[7, 0, :, :, :1] == 0).all() and (windowed[7, 0, :, :, 1:] == 7).all()
    for kv in (cache.kv, windowed):
        assert (kv[0, :, :, :, 5:] == 255).all() and (kv[[1, 3, 4, 6]] == 255).all()
