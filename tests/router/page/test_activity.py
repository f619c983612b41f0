"""The activity of a process: rows and sums, only while somebody watches."""

from __future__ import annotations

import msgspec
import pytest

from router.core.cluster import ProcessState, state_of
from router.page.activity import FIRST_S, GROWTH, MAX_ENDED, Activity, Row, Watch, Work, bucket
from tests.router.scripted import Router, first
from wire.frames import DecodeDone, DecodeToken, PrefillDone
from wire.payloads import Usage, encode_map
from wire.timeline import Entry, Kind, pack_timeline


def watch(router: Router) -> Watch:
    def state() -> ProcessState:
        return state_of(router.dispatcher, router.now)

    return Watch(router.dispatcher, state, lambda: router.now)


def test_nothing_is_counted_before_the_start_and_after_the_stop() -> None:
    router = Router()
    router.pair()
    watched, before = watch(router), list(router.dispatcher.observers)
    serve(router)
    watched.start()
    assert watched.look(0.0).sums.ended == {}
    serve(router)
    assert watched.look(0.0).sums.ended == {"length": 1}
    watched.stop()
    assert router.dispatcher.observers == before
    serve(router)
    watched.start()
    assert watched.look(0.0).sums.ended == {}


def test_a_request_from_the_queue_to_its_end() -> None:
    router = Router()
    watched = watch(router)
    watched.start()
    prefill, decode = router.pair()
    router.submit(3, 3)
    number = router.prefill_id()
    [row] = watched.look(0.0).rows
    assert (row.state, row.prompt, row.queue_s, row.ttft_s) == ("prefill", 3, 0.0, None)
    assert (row.prefill, row.decode, row.attempts) == ("prefill-0", "decode-0", 1)
    router.now += 0.25
    router.say(prefill, PrefillDone(number, 96), first())
    router.now += 0.25
    router.say(decode, DecodeToken(number, 7))
    seen = watched.look(0.0)
    [row] = seen.rows
    assert (row.state, row.ttft_s, row.tokens) == ("decode", 0.25, 2)
    assert seen.sums.ttft == {bucket(0.25): 1} and seen.sums.itl == {bucket(0.25): 1}
    assert seen.sums.work == {"prefill-0": Work(3, 0, 0), "decode-0": Work(0, 0, 2)}
    router.now += 0.5
    router.say(decode, [DecodeToken(number, 8), DecodeToken(number, 9)])
    # The transfer began before DECODE_REQUEST came.
    entries = Entry(Kind.TRANSFER, 0.0, 0.5, 1), Entry(Kind.REQUEST, 0.125, 0.75)
    usage = Usage(
        finish_reason="length",
        kv_bytes=96,
        kv_seconds=0.5,
        kv_transfer_seconds=0.125,
        timeline=pack_timeline(entries),
    )
    router.say(decode, DecodeDone(number), encode_map(usage))
    seen = watched.look(router.now - 0.1)
    [row] = seen.rows
    assert (row.state, row.total_s, row.tokens, row.kv_bytes) == ("length", 1.0, 4, 96)
    assert (row.ttft_s, row.transfer_at_s, row.transfer_s) == (0.25, 0.125, 0.5)
    assert seen.sums.ended == {"length": 1} and seen.sums.ttft == {bucket(0.25): 1}
    assert seen.sums.itl == {bucket(0.25): 3}
    assert seen.sums.links == {"prefill-0>decode-0": (96, 0.125)}
    assert seen.sums.work["decode-0"].generated == 4
    assert watched.look(router.now).rows == []


def test_of_many_ends_some_are_listed_and_all_are_counted() -> None:
    router = Router()
    router.pair()
    watched = watch(router)
    watched.start()
    watched.look(0.0)
    router.now += 1
    for _ in range(3 * MAX_ENDED):
        serve(router)
    seen = watched.look(0.5)
    assert seen.sums.ended == {"length": 3 * MAX_ENDED} and len(seen.rows) == MAX_ENDED


def test_who_begins_to_watch_gets_what_ended_before() -> None:
    router = Router()
    router.pair()
    serve(router)
    watched = watch(router)
    watched.start()
    [row] = watched.look(-1.0).rows
    assert (row.state, row.total_s) == ("length", 0.0)


def test_a_request_keeps_its_key_when_it_ends_and_when_the_watch_starts_again() -> None:
    router = Router()
    router.pair()
    watched = watch(router)
    watched.start()
    router.submit(3, 0)
    [opened] = watched.look(-1.0).rows
    router.say(b"prefill-0-1", PrefillDone(router.prefill_id(), 0), first())
    [ended] = watched.look(-1.0).rows
    watched.stop()
    watched.start()
    [earlier] = watched.look(-1.0).rows
    assert opened.key == ended.key and ended == earlier


def test_an_activity_passes_between_processes() -> None:
    router = Router()
    router.pair()
    watched = watch(router)
    watched.start()
    serve(router)
    seen = watched.look(-1.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(seen), type=Activity) == seen


def test_a_row_has_no_text_and_no_client() -> None:
    assert not {"client", "salt", "chain", "text", "token_ids"} & set(Row.__struct_fields__)


@pytest.mark.parametrize("duration_s", [0.0, 1e-6, 2e-5, 0.003, 1.0, 500.0])
def test_a_bucket_is_ten_percent_wide(duration_s: float) -> None:
    lower = FIRST_S * GROWTH ** bucket(duration_s)
    assert lower <= max(duration_s, FIRST_S) * 1.0001 < lower * GROWTH * 1.001


def serve(router: Router) -> None:
    """A request of one token, which is served at once."""
    router.submit(3, 0)
    router.say(b"prefill-0-1", PrefillDone(router.prefill_id(), 0), first())
