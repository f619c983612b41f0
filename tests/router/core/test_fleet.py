from __future__ import annotations

import pytest

from router.core.fleet import MAX_LOST, MISSED_BEATS, Fleet, WorkerState
from tests.router.scripted import LAYOUT, detail, fleet, load, worker
from wire.errors import ErrorCode, RemoteProtocolError, WireError
from wire.frames import NO_RANK, Heartbeat, Hello, Role
from wire.identity import Identity
from wire.layout import KVLayout
from wire.payloads import HelloDetail, Load, PeerDetail

# After so long without a word, at one heartbeat a second, a worker gives way to another.
GONE_S = 2.1
BEAT = Heartbeat(3, 2, 1)


def hello(
    table: Fleet,
    role: Role = Role.DECODE,
    rank: int = 0,
    epoch: int = 1,
    now: float = 0.0,
    **changes: object,
) -> bytes:
    identity = Identity(role, rank, epoch).name
    table.hello(identity, Hello(epoch, rank, role), detail(**changes), now)
    return identity


def test_a_worker_is_ready_from_its_first_load_on() -> None:
    table = fleet()
    identity = hello(table)
    worker = table.get(identity)
    assert worker is not None and worker.state is WorkerState.JOINING
    assert worker.available_blocks == 0
    assert table.ready(Role.DECODE) == []
    table.heartbeat(identity, BEAT, load(64, used=10, cached=4), 1.0)
    assert table.ready(Role.DECODE) == [worker] and table.ready(Role.PREFILL) == []
    assert (worker.step, worker.running, worker.waiting) == (3, 2, 1)
    assert worker.available_blocks == 54
    assert worker.name == "decode-0"


@pytest.mark.parametrize(
    ("frame", "about", "fix"),
    [
        (Hello(1, 0, Role.CLIENT), detail(), "only workers of prefill, decode or any"),
        (Hello(1, NO_RANK, Role.DECODE), detail(), "reserved"),
        (Hello(1, 0, Role.DECODE), detail(fingerprint="beef"), "--model"),
        (Hello(1, 0, Role.DECODE), detail(kv_endpoint=""), "--kv-advertise"),
        (Hello(1, 0, Role.DECODE), detail(kv_endpoint="tcp://0.0.0.0:1"), "--kv-advertise"),
        (Hello(1, 0, Role.DECODE), detail(kv_endpoint="tcp://[::]:1"), "--kv-advertise"),
        (Hello(1, 0, Role.DECODE), detail(kv_endpoint="tcp://224.0.0.1:1"), "--kv-advertise"),
        (Hello(1, 0, Role.DECODE), detail(num_blocks=0), "--num-blocks"),
        (
            Hello(1, 0, Role.DECODE),
            detail(
                layout=KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
            ),
            "KV layout 2 layers x 2 heads x 8 of float32, the cluster has .*, --dtype and",
        ),
    ],
)
def test_a_mismatch_is_refused_and_says_what_to_fix(
    frame: Hello, about: HelloDetail, fix: str
) -> None:
    table = fleet()
    hello(table, Role.PREFILL, num_blocks=1)
    with pytest.raises(WireError, match=fix) as caught:
        table.hello(b"x", frame, about, 0.0)
    assert caught.value.code is ErrorCode.MISMATCH
    assert table.get(b"x") is None


def test_a_limit_is_what_some_worker_of_each_role_takes() -> None:
    table = fleet()
    hello(table)
    assert (table.max_kv_transfer_bytes, table.max_model_len) == (1 << 20, 1000)
    hello(table, Role.PREFILL, 0, max_kv_transfer_bytes=5, max_model_len=10)
    assert (table.max_kv_transfer_bytes, table.max_model_len) == (5, 10)
    hello(table, Role.PREFILL, 1, max_kv_transfer_bytes=7, max_model_len=20)
    assert (table.max_kv_transfer_bytes, table.max_model_len) == (7, 20)
    hello(table, Role.PREFILL, 2, max_kv_transfer_bytes=2**63 - 1, max_model_len=2**31 - 1)
    assert (table.max_kv_transfer_bytes, table.max_model_len) == (1 << 20, 1000)
    hello(table, Role.DECODE, 1, max_kv_transfer_bytes=0, max_model_len=1)
    assert (table.max_kv_transfer_bytes, table.max_model_len) == (1 << 20, 1000)
    assert table.own_max_kv_transfer_bytes == 1 << 20


@pytest.mark.parametrize("epoch", [4, 6])
def test_an_incumbent_that_is_alive_keeps_its_rank(epoch: int) -> None:
    table = fleet()
    old = hello(table, epoch=5)
    table.heartbeat(old, BEAT, load(), 10.0)
    with pytest.raises(WireError, match=r"epoch 5.*another --rank, or stop") as caught:
        hello(table, epoch=epoch, now=12.0)
    assert caught.value.code is ErrorCode.FENCED
    assert table.get(old) is not None and [worker.epoch for worker in table] == [5]
    assert table.fence_s == 3.0, "by then it would have been missed"


@pytest.mark.parametrize("first", [Role.PREFILL, Role.DECODE, Role.ANY])
@pytest.mark.parametrize("second", [Role.PREFILL, Role.DECODE, Role.ANY])
def test_decode_and_any_workers_share_their_ranks(first: Role, second: Role) -> None:
    """A PREFILL_REQUEST names the worker that decodes by its rank alone."""
    table = fleet()
    hello(table, first)
    if (first is Role.PREFILL) != (second is Role.PREFILL):
        hello(table, second, epoch=2)
        assert [each.role for each in table.live] == [first, second]
        return
    with pytest.raises(WireError, match="is here already") as caught:
        hello(table, second, epoch=2)
    assert caught.value.code is ErrorCode.FENCED
    hello(table, second, epoch=2, now=GONE_S)
    assert [each.role for each in table] == [second]


@pytest.mark.parametrize("idle_s", [3.0, 0.2])
def test_the_cost_of_an_idle_worker_approaches_the_lowest(idle_s: float) -> None:
    table = fleet()
    workers = [table.get(hello(table, rank=rank)) for rank in range(2)]
    for each, step_s in zip(workers, (idle_s, 1.0), strict=True):
        assert each is not None
        each.on_load(load(step_s=step_s))
    for number in range(200):
        table.update_costs()
        workers[1].on_load(load(step_s=1.0 + number % 2 / 1000))  # type: ignore[union-attr]
    idle, busy = (each.step_s for each in workers if each is not None)
    assert busy == pytest.approx(1.0, abs=0.01)
    assert idle == pytest.approx(min(idle_s, 1.0), rel=0.02)


@pytest.mark.parametrize("epoch", [4, 6])
def test_a_silent_worker_loses_its_rank(epoch: int) -> None:
    table = fleet()
    old = hello(table, epoch=5)
    table.heartbeat(old, BEAT, load(), 10.0)
    new = Identity(Role.DECODE, 0, epoch)
    hello_of_new = Hello(epoch, 0, Role.DECODE)
    _, replaced = table.hello(new.name, hello_of_new, detail(), 10.0 + GONE_S)
    assert replaced is not None and replaced.identity == old
    assert replaced.state is WorkerState.LOST
    assert [worker.epoch for worker in table] == [epoch]


@pytest.mark.parametrize(
    "counted",
    [
        Load(total=65, used=0, cached=0, free=65),
        Load(total=64, used=65, cached=0, free=0),
        Load(total=64, used=0, cached=2**53 - 1, free=0),
        Load(total=64, used=0, cached=0, free=65),
    ],
)
def test_a_worker_counts_no_other_blocks_than_it_has(counted: Load) -> None:
    table = fleet()
    identity = hello(table)
    with pytest.raises(RemoteProtocolError, match="blocks"):
        table.heartbeat(identity, BEAT, counted, 1.0)
    assert table.ready(Role.DECODE) == []


def test_the_same_worker_coming_again_starts_anew() -> None:
    table = fleet()
    identity = hello(table)
    table.heartbeat(identity, BEAT, load(), 0.0)
    joined, replaced = table.hello(identity, Hello(1, 0, Role.DECODE), detail(), 0.0)
    assert replaced is not None and replaced is not joined
    assert joined.state is WorkerState.JOINING
    assert table.get(identity) is joined


def test_missed_heartbeats_make_a_worker_overdue() -> None:
    table = fleet(heartbeat_s=0.5)
    first, second = hello(table, rank=0), hello(table, rank=1)
    table.heartbeat(first, BEAT, load(), 1.0)
    late = 0.5 * MISSED_BEATS + 0.1
    assert [worker.identity for worker in table.overdue(late)] == [second]
    assert len(table.overdue(late + 0.5)) == 1
    assert len(table.overdue(late + 1.0)) == 2


def test_a_pause_of_the_router_is_not_taken_for_silence_of_its_workers() -> None:
    table = fleet(heartbeat_s=0.5)
    identity = hello(table)
    for look in range(5):
        assert table.overdue(0.1 * look) == []
    assert table.overdue(5.0) == [], "what was said meanwhile is not read yet"
    looks = [table.overdue(5.0 + 0.1 * look) for look in range(1, 20)]
    assert looks[0] == [] and [worker.identity for worker in looks[-1]] == [identity]


def test_a_worker_that_is_in_one_step_for_too_long_is_suspect() -> None:
    table = fleet(stall_s=2.0)
    identity = hello(table)
    for step_ms, state in ((1999, WorkerState.READY), (2000, WorkerState.SUSPECT), (0, "ready")):
        worker = table.heartbeat(identity, BEAT, load(step_ms=step_ms), 1.0)
        assert worker is not None and worker.state == state


def test_a_lost_worker_stays_listed_until_its_rank_is_back() -> None:
    table = fleet()
    identity = hello(table)
    table.heartbeat(identity, BEAT, load(64, used=64), 0.0)
    lost = table.lose(identity)
    assert lost is not None and lost.state is WorkerState.LOST and lost.load is None
    assert (lost.running, lost.waiting) == (0, 0), "nothing runs on it"
    assert list(table) == [lost] and table.live == []
    assert table.lose(identity) is None
    hello(table, epoch=2, now=GONE_S)
    assert [worker.epoch for worker in table] == [2]


def test_a_worker_that_drained_is_not_listed_as_lost() -> None:
    table = fleet()
    identity = hello(table)
    drained = table.drain(identity)
    assert drained is not None and drained.state is WorkerState.DRAINING
    table.heartbeat(identity, BEAT, load(), 0.0)
    assert drained.state is WorkerState.DRAINING and table.ready(Role.DECODE) == []
    table.lose(identity)
    assert list(table) == []
    assert table.drain(identity) is None
    assert table.heartbeat(identity, BEAT, load(), 0.0) is None


def test_lost_workers_are_bounded() -> None:
    table = fleet()
    for rank in range(MAX_LOST + 10):
        table.lose(hello(table, rank=rank))
    assert len(list(table)) == MAX_LOST


@pytest.mark.parametrize("role", [Role.DECODE, Role.ANY])
def test_peers_are_the_workers_that_decode_also_when_they_drain(role: Role) -> None:
    table = fleet()
    hello(table, Role.PREFILL)
    assert table.peers() == [] and table.layout == LAYOUT and table.max_model_len == 1000
    identity = hello(table, role, rank=3, epoch=8, kv_unasked_bytes=99)
    table.drain(identity)
    assert table.peers() == [
        PeerDetail(
            role=role.name.lower(),
            rank=3,
            epoch=8,
            kv_endpoint="tcp://127.0.0.1:1",
            block_size=16,
            kv_unasked_bytes=99,
        )
    ]


def test_a_promise_counts_until_a_heartbeat_shows_its_blocks() -> None:
    it = worker(Role.DECODE)
    it.promise(1, 3)
    assert it.available_blocks == 61
    it.on_load(load(64))
    assert it.available_blocks == 61  # Not settled: the blocks are not taken yet.
    it.settle(1)
    it.settle(2)
    it.on_load(load(64, used=3))
    assert it.available_blocks == 61 and not it.promised
    it.unpromise(1)
    assert it.promised_blocks == 0


def test_requests_of_other_routers_are_those_that_we_did_not_place() -> None:
    table = fleet()
    worker = table.get(hello(table))
    assert worker is not None
    worker.attempts.update({1, 2})
    for running, waiting, others in ((2, 0, 0), (4, 1, 3), (0, 1, 0)):
        table.heartbeat(worker.identity, Heartbeat(1, running, waiting), load(64), 1.0)
        assert worker.num_others == others
    table.heartbeat(worker.identity, Heartbeat(1, 9, 0), load(64), 1.0)
    table.lose(worker.identity)
    assert worker.num_others == 0


def test_processes_that_share_workers_begin_with_different_ones() -> None:
    for process, turns in ((0, [0, 1, 0, 1]), (1, [1, 0, 1, 0])):
        table = fleet(process=process, num_processes=2)
        workers = [table.get(hello(table, rank=rank)) for rank in range(4)]
        assert [worker.turn for worker in workers if worker] == turns
