"""Planted reasons why a prompt was not cached, through the real bus and dispatcher."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.history.misses import sentence
from router.core.history.record import Cache, Reason
from router.core.request import Request
from router.core.state import Limits
from tests.router.scripted import RecordingSink, Router, load
from wire.frames import DecodeDone, Drain, PrefillDone, PrefillRequest, Role, Tag
from wire.options import Options
from wire.payloads import PrefillResult, TierLoad, Usage, encode_map, encode_prefill_result
from wire.prefix import prefix_hashes

SIZE = 16
P0, D0 = b"prefill-0-1", b"decode-0-1"
BASE = tuple(range(100, 170))  # 70 tokens: 4 blocks and 6 tokens


class Scene(Router):
    """Workers with a real amount of cache each, which is told by the test."""

    def __init__(self, **limits: object) -> None:
        super().__init__(Limits(max_attempts=1, **limits))  # type: ignore[arg-type]
        self.pair()
        self.number = 0

    def begin(self, prompt: tuple[int, ...], client: str = "anna", **options: Any) -> int:
        """Submit a request; return the id of its attempt, whose worker is in `self.at`."""
        self.number += 1
        request = Request(prompt, Options(**options), 0, client, f"r{self.number}")
        self.sink = RecordingSink()
        self.dispatcher.submit(request, self.sink)
        [(self.at, message)] = self.take(Tag.PREFILL_REQUEST)
        assert isinstance(message.frame, PrefillRequest)
        return message.frame.request_id

    def read(self, request_id: int, cached: int = 0) -> Cache:
        """The worker has read the prompt, of which so many tokens were cached."""
        result = PrefillResult(token_id=7, finish_reason="length", cached_tokens=cached)
        self.say(self.at, PrefillDone(request_id, 0), encode_prefill_result(result))
        record = self.sink.books[0].record
        assert record is not None and record.cache is not None
        return record.cache

    def ask(self, prompt: tuple[int, ...], cached: int = 0, **options: Any) -> Cache:
        return self.read(self.begin(prompt, **options), cached)

    def hold(self, peer: bytes, prompt: tuple[int, ...], num_blocks: int | None = None) -> None:
        """The worker reports the blocks of a prompt as cached."""
        hashes = prefix_hashes(prompt, SIZE)[:num_blocks]
        self.now += 0.1
        self.beat(peer, load(cached=len(hashes), stored=tuple(hashes)))

    def evict(
        self, peer: bytes, prompt: tuple[int, ...], start: int = 0, tier: str | None = None
    ) -> None:
        """The worker reports that it lost the blocks from `start` on, which `tier` had last."""
        self.now += 0.1
        hashes = tuple(prefix_hashes(prompt, SIZE)[start:])
        lost = {tier: TierLoad(evicted=hashes)} if tier else {"evicted": hashes}
        self.beat(peer, load(cached=1, **lost))


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def seen(scene: Scene) -> Scene:
    """`BASE` was asked once, and its worker reports it as cached."""
    scene.ask(BASE)
    scene.hold(P0, BASE)
    return scene


def test_a_prompt_that_is_new(scene: Scene) -> None:
    cache = scene.ask(BASE)
    assert (cache.reason, cache.longest_match, cache.earlier) == (Reason.UNSEEN, 0, None)
    scene.hold(P0, BASE)
    assert scene.ask(tuple(range(70))).reason is Reason.UNSEEN, "it has nothing in common"


def test_a_prompt_that_is_whole_in_the_cache(seen: Scene) -> None:
    cache = seen.ask(BASE, 64)
    assert (cache.reason, cache.prefill_worker, cache.reusable) == (Reason.HIT, 64, 64)
    assert (cache.longest_match, cache.diverged_at, cache.earlier) == (70, None, "r1")


def test_a_prompt_that_goes_on_where_an_earlier_one_ended(seen: Scene) -> None:
    cache = seen.ask((*BASE, 7, *range(40)), 64)  # 7 was the answer
    assert (cache.reason, cache.longest_match, cache.diverged_at) == (Reason.EXTENDED, 71, None)


@pytest.mark.parametrize("position", [0, 1, 15, 16, 50, 63])
def test_a_prompt_that_differs_at_one_token(seen: Scene, position: int) -> None:
    changed = (*BASE[:position], 5, *BASE[position + 1 :])
    cache = seen.ask(changed, position // SIZE * SIZE)
    reason = Reason.DIVERGED if position else Reason.UNSEEN
    assert (cache.reason, cache.longest_match) == (reason, position)
    assert cache.diverged_at == (position or None)


def test_the_last_token_is_always_computed(scene: Scene) -> None:
    scene.ask(BASE[:64])
    scene.hold(P0, BASE[:64])
    cache = scene.ask(BASE[:64], 48)
    assert (cache.reason, cache.longest_match, cache.reusable) == (Reason.HIT, 64, 48)


def test_a_prompt_shorter_than_a_block(seen: Scene) -> None:
    assert seen.ask(BASE[:16]).reason is Reason.SHORT, "its last token is always computed"


@pytest.mark.parametrize("tier", [None, "host", "disk"])
def test_blocks_whose_eviction_was_reported(seen: Scene, tier: str | None) -> None:
    seen.evict(P0, BASE, 1, tier)
    cache = seen.ask(BASE, 16)
    assert (cache.reason, cache.worker, cache.at) == (Reason.EVICTED, "prefill-0", seen.now)
    assert cache.reusable == 64 and cache.tier == (tier or "kv_cache")
    assert {None: "its KV cache", "host": "host memory", "disk": "disk"}[tier] in sentence(
        cache, 70
    )


@pytest.mark.parametrize("is_reported", [False, True])
def test_blocks_whose_eviction_is_not_reported_yet(seen: Scene, is_reported: bool) -> None:
    request_id = seen.begin(BASE)
    if is_reported:  # while the prompt is read
        seen.evict(P0, BASE, 2)
    cache = seen.read(request_id, 32)
    assert (cache.reason, cache.worker) == (Reason.EVICTED, "prefill-0")
    assert cache.at == (seen.now if is_reported else None)
    assert cache.tier == ("kv_cache" if is_reported else None)


def test_an_eviction_long_before_is_not_taken_for_the_unreported_one(seen: Scene) -> None:
    seen.evict(P0, BASE)
    seen.ask(BASE)
    seen.hold(P0, BASE)
    seen.now += 100
    cache = seen.ask(BASE, 0)
    assert (cache.reason, cache.at) == (Reason.EVICTED, None)


def test_a_worker_that_is_lost_and_one_that_was_restarted(seen: Scene) -> None:
    seen.join(Role.PREFILL, 1)
    lost_at = seen.now = seen.now + 5
    seen.bus.on_lost(P0)
    cache = seen.ask(BASE)
    assert (cache.reason, cache.worker, cache.at) == (Reason.WORKER_LOST, "prefill-0", lost_at)
    seen.evict(b"prefill-1-1", BASE)
    seen.bus.on_lost(b"prefill-1-1")
    restarted_at = seen.now
    seen.join(Role.PREFILL, 1, epoch=2)
    cache = seen.ask((*BASE, 7))
    assert (cache.reason, cache.worker, cache.at) == (Reason.EVICTED, "prefill-1", restarted_at)


def test_a_worker_that_was_restarted(seen: Scene) -> None:
    seen.bus.on_lost(P0)
    seen.join(Role.PREFILL, 0, epoch=2)
    cache = seen.ask(BASE)
    assert (cache.reason, cache.worker) == (Reason.WORKER_RESTARTED, "prefill-0")
    assert cache.at == seen.now


@pytest.mark.parametrize("because", ["draining", "suspect", "full", "cost"])
def test_a_worker_that_has_it_and_is_not_chosen(because: str) -> None:
    scene = Scene(max_running_per_worker=2)
    scene.ask(BASE)
    scene.hold(P0, BASE)
    other = scene.join(Role.PREFILL, 1)
    if because == "draining":
        scene.say(P0, Drain(1, 0))
    elif because == "suspect":
        scene.now += 2.5
        for peer in (other, D0):
            scene.beat(peer, load())
        scene.bus.tick()
    elif because == "full":
        worker = scene.fleet.get(P0)
        assert worker is not None
        worker.num_active = 2
    else:
        for peer, token_s in ((P0, 1.0), (other, 1e-6)):
            scene.beat(peer, load(step_s=0.0, token_s=token_s, sequence_s=0.0, cached=4))
        scene.fleet.update_costs()
    cache = scene.ask(BASE)
    assert scene.at == other
    assert (cache.reason, cache.worker) == (Reason.ELSEWHERE, "prefill-0")
    assert cache.because == because


def test_an_answer_that_only_the_decode_worker_has(seen: Scene) -> None:
    request_id = seen.begin(BASE[:60])
    seen.read(request_id)
    longer = (*BASE[:60], 7, *range(200, 220))
    seen.ask(longer)
    seen.hold(D0, longer)
    seen.bus.index.evict(P0, prefix_hashes(longer, SIZE)[3:])  # it never read the answer
    cache = seen.ask((*longer, 1), 48)
    assert (cache.reason, cache.worker) == (Reason.ELSEWHERE, "decode-0")
    assert cache.because == "role"
    seen.evict(P0, longer, 2)
    seen.hold(D0, longer[:64])
    seen.evict(D0, longer, 3)  # later, and of no interest
    cache = seen.ask((*longer, 2), 32)
    assert (cache.reason, cache.worker) == (Reason.EVICTED, "prefill-0"), "that it could have had"
    seen.evict(P0, longer, 2)
    seen.evict(D0, longer, 2)  # of no interest either
    cache = seen.ask((*longer, 3), 32)
    assert (cache.reason, cache.worker) == (Reason.EVICTED, "prefill-0")


def test_an_earlier_prompt_that_is_still_read(scene: Scene) -> None:
    scene.begin(BASE)
    assert scene.ask((*BASE, 1)).reason is Reason.IN_FLIGHT


def test_a_prompt_whose_tokens_are_scored(seen: Scene) -> None:
    assert seen.ask(BASE, prompt_logprobs=0).reason is Reason.PROMPT_LOGPROBS


def test_another_salt(scene: Scene) -> None:
    scene.ask(BASE, cache_salt="one")
    scene.hold(P0, BASE)
    assert scene.ask(BASE, cache_salt="two").reason is Reason.OTHER_SALT
    scene.hold(P0, BASE)
    assert scene.ask(BASE, 64, cache_salt="one").reason is Reason.HIT


def test_a_worker_without_a_prefix_cache(scene: Scene) -> None:
    scene.ask(BASE)
    assert scene.ask(BASE).reason is Reason.EVICTED, "no heartbeat yet: the cache may exist"
    scene.now += 1
    scene.beat(P0, load())
    cache = scene.ask(BASE)
    assert (cache.reason, cache.worker) == (Reason.CACHE_OFF, "prefill-0")


def test_a_worker_that_comes_back_without_a_prefix_cache(seen: Scene) -> None:
    seen.bus.on_lost(P0)
    seen.join(Role.PREFILL, 0)
    other = tuple(range(70))
    seen.ask(other)
    seen.now += 1
    seen.beat(P0, load())
    assert seen.ask(other).reason is Reason.CACHE_OFF


def test_blocks_that_nobody_reports(scene: Scene) -> None:
    scene.ask(BASE)
    scene.hold(P0, BASE)
    scene.bus.index.evict(P0, prefix_hashes(BASE, SIZE))  # as the router's index may when full
    assert scene.ask(BASE).reason is Reason.NOT_KEPT


def test_tokens_cached_by_a_request_that_is_forgotten() -> None:
    scene = Scene(max_records=1)
    scene.ask(BASE)
    scene.hold(P0, BASE)
    scene.ask(tuple(range(40)))
    assert scene.ask((*BASE, *range(40)), 64).reason is Reason.NOT_REMEMBERED


def test_a_client_is_compared_with_itself_only(seen: Scene) -> None:
    """Prompts and evictions of other clients change nothing in the explanation."""
    seen.ask(BASE[:40], client="ben")
    seen.evict(P0, BASE, 1)
    cache = seen.ask((*BASE[:40], *range(30)), 0, client="carl")
    assert cache == Cache(Reason.UNSEEN, 0, 0, 0, 0)


def test_a_local_prefill() -> None:
    scene = Scene(local_prefill=True)
    scene.bus.on_lost(P0)
    scene.number += 1
    request = Request(BASE, Options(), 1, "anna", "local")
    sink = RecordingSink()
    scene.dispatcher.submit(request, sink)
    [(peer, message)] = scene.take(Tag.PREFILL_REQUEST)
    request_id = message.frame.request_id  # type: ignore[attr-defined]
    assert peer == D0
    scene.say(D0, PrefillDone(request_id, 0), encode_prefill_result(PrefillResult(token_id=7)))
    scene.say(D0, DecodeDone(request_id), encode_map(Usage(finish_reason="stop")))
    record = sink.books[0].record
    assert record is not None and record.cache is not None
    [placed] = record.placed
    assert (placed.prefill, placed.decode, placed.local) == (None, D0, "no_prefill_worker")


def test_an_attempt_that_goes_on_leaves_the_explanation_of_the_first() -> None:
    router = Router(Limits(local_prefill=True, max_attempts=2))
    busy = router.join(Role.PREFILL, 0)
    first_worker = router.join(Role.DECODE, 0)
    for peer, token_s in ((busy, 1.0), (first_worker, 1e-6)):
        router.beat(peer, load(step_s=0.0, token_s=token_s, sequence_s=0.0))
    router.fleet.update_costs()
    sink = RecordingSink()
    router.dispatcher.submit(Request(BASE, Options(), 3, "anna", "r1"), sink)
    result = encode_prefill_result(PrefillResult(token_id=7))
    router.say(first_worker, PrefillDone(router.prefill_id(), 0), result)
    router.bus.on_lost(busy)
    router.bus.on_lost(first_worker)
    second_worker = router.join(Role.DECODE, 1)
    request_id = router.prefill_id()
    router.say(second_worker, PrefillDone(request_id, 0), result)
    router.say(second_worker, DecodeDone(request_id), encode_map(Usage(finish_reason="stop")))
    record = sink.books[0].record
    assert record is not None and record.prefiller == first_worker
    assert [each.local for each in record.placed] == ["cost", "no_prefill_worker"]


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    cache = Cache(reason, 16, 0, 31, 32, worker="prefill-0", because="draining")
    text = sentence(cache, 70)
    assert text.startswith("16 of 70 tokens were cached: ")
    assert "None" not in text and "{" not in text
