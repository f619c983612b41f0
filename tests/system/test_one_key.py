"""The holder of one worker's key can act on a real cluster's bus as that worker only.

A hostile peer holds the key of decode-1 or of prefill-0.  As decode-1 it joins, as it may; as
prefill-0 it finds the real one alive.  It then sends frames that are not its own, while one request
is held by decode-0 and another was placed on the peer itself.  Both requests must end as if nobody
had sent anything, and the real workers must stay.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
import zmq

from scripts.tcp_client import connect
from tests.cluster import until
from tests.faults.checks import problems
from tests.faults.clients import Record, TcpClient
from tests.system.locked import Locked
from wire.aio.port import client_options
from wire.errors import ErrorCode
from wire.frames import (
    Cancel,
    DecodeDone,
    DecodeToken,
    Drain,
    Error,
    Frame,
    Heartbeat,
    Hello,
    PrefillDone,
    Role,
    Tag,
)
from wire.identity import Identity
from wire.options import Options
from wire.parts import Message, decode, encode
from wire.payloads import (
    ErrorDetail,
    HelloDetail,
    Load,
    PrefillResult,
    encode_map,
    encode_prefill_result,
)
from wire.process.model import fingerprint, locate
from worker.executor.hash import LAYOUT

WORDS = "words of a hostile worker"
VICTIM, OWN = [11, 22, 33], [44, 55, 66, 77]
NUM_TOKENS = 5
LOAD = encode_map(Load(total=64, used=0, cached=0, free=64))


class Ids(NamedTuple):
    """Request ids on the bus: of the one that decode-0 holds, and of the one placed on the peer."""

    others: int
    own: int


class Hostile:
    """A peer of the bus with the key of one party."""

    def __init__(self, cluster: Locked, key: str, identity: bytes = b"") -> None:
        role, _, rank = key.partition("-")
        self.identity = Identity(Role[role.upper()], int(rank), time.time_ns())
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        public = cluster.pair("router").public
        for name, value in client_options(cluster.pair(key), public).items():
            self._socket.setsockopt(getattr(zmq, name), value)
        self._socket.setsockopt(zmq.ROUTING_ID, identity or self.identity.name)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(cluster.bus)

    def say(self, frame: Frame, *payload: bytes) -> None:
        self._socket.send_multipart(encode(frame, *payload))

    def hello(self, role: Role | None = None, rank: int | None = None, **about: Any) -> None:
        me = self.identity
        frame = Hello(
            about.pop("epoch", me.epoch),
            me.rank if rank is None else rank,
            me.role if role is None else role,
        )
        self.say(frame, encode_map(detail(**about)))

    def join(self) -> None:
        self.hello()
        assert self.hear(Tag.WELCOME)
        self.say(Heartbeat(0, 0, 0), LOAD)

    def hear(self, tag: Tag, timeout_s: float = 20.0) -> Message | None:
        """The next message of this tag; None when there is none in time."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._socket.poll(math.ceil(left_s * 1000)):
                message = decode(self._socket.recv_multipart())
                if message.tag is tag:
                    return message
        return None

    def refusal(self) -> ErrorCode:
        message = self.hear(Tag.ERROR)
        assert message is not None and isinstance(message.frame, Error)
        return ErrorCode(message.frame.code)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def detail(**changes: Any) -> HelloDetail:
    fields: dict[str, Any] = {
        "model": "demo",
        "fingerprint": fingerprint(locate("demo")),
        "layout": LAYOUT,
        "block_size": 16,
        "num_blocks": 64,
        "max_model_len": 2048,
        "max_kv_transfer_bytes": 1 << 30,
        "arithmetic": "hash",
        "threads": 1,
        "kv_endpoint": "tcp://127.0.0.1:9",
    }
    return HelloDetail(**(fields | changes))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    # A hostile peer sends no heartbeats but those that a test is about.
    with Locked(tmp_path_factory.mktemp("one-key"), "--heartbeat-ms", "60000") as cluster:
        yield cluster


@asynccontextmanager
async def two_requests(cluster: Locked) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Two raw TCP requests: decode-0 holds the first; the call sends the second.

    At the end both must have the text of the hash executor, and the real workers must be there.
    """
    connection = await connect(*cluster.tcp)
    connection.send(Hello.of_client(), cluster.key.encode())
    client = TcpClient(connection)
    records = [Record(prompt, Options(), NUM_TOKENS, "tcp") for prompt in (VICTIM, OWN)]
    victim = await client.begin(records[0])
    await records[0].until_tokens(1)

    async def send_own() -> None:
        client.go_on(await client.begin(records[1]))

    yield send_own
    client.go_on(victim)
    for record in records:
        await record.until_tokens(NUM_TOKENS + 1)
    assert problems(records) == []
    await client.close()
    for role in ("prefill", "decode"):
        row = cluster.ready(role, 0)
        assert row["epoch"] == epochs(cluster)[role], "it was never replaced"
    assert "NaN" not in metrics(cluster) and WORDS not in metrics(cluster)


def metrics(cluster: Locked) -> str:
    url = f"{cluster.http}/metrics"
    return httpx.get(url, headers=cluster.headers, trust_env=False, timeout=60).text


def epochs(cluster: Locked) -> dict[str, int]:
    """Of the workers that joined as rank 0, from the log; one each."""
    events = cluster.events("worker joined")
    joined = [event for event in events if event["worker"].endswith("-0")]
    assert len(joined) == 2, joined
    return {event["worker"].partition("-")[0]: event["epoch"] for event in joined}


Action = Callable[[Hostile, Ids], None]
SAID = encode_map(ErrorDetail(message=WORDS))
READ = encode_prefill_result(PrefillResult(token_id=7))

# The outcome of a frame, and the frame.
#   dropped: the router ends the peer's registration
#   ignored: the router counts the frame, and that is all
#   tried elsewhere: it ends this attempt of the peer's own request, and another one follows
CASES: dict[str, tuple[str, Action]] = {
    "HELLO as prefill-0": ("dropped", lambda it, ids: it.hello(Role.PREFILL, 0)),
    "PREFILL_DONE of another's request": (
        "ignored",
        lambda it, ids: it.say(PrefillDone(ids.others, 0), READ),
    ),
    "DECODE_TOKEN of another's request": (
        "ignored",
        lambda it, ids: it.say(DecodeToken(ids.others, 7)),
    ),
    "ERROR of another's request": (
        "ignored",
        lambda it, ids: it.say(Error(ids.others, ErrorCode.INVALID_REQUEST), SAID),
    ),
    "a finish_reason of its own": (
        "tried elsewhere",
        lambda it, ids: it.say(
            DecodeDone(ids.own), msgspec.msgpack.encode({"finish_reason": WORDS})
        ),
    ),
}


@pytest.mark.parametrize(("outcome", "action"), CASES.values(), ids=CASES)
async def test_a_worker_that_joined_does_only_what_is_its_to_do(
    keyed: Locked, outcome: str, action: Action
) -> None:
    def row() -> dict[str, Any] | None:
        return keyed.find("decode", 1)

    with closing(Hostile(keyed, "decode-1")) as peer:
        async with two_requests(keyed) as send_own:
            peer.join()
            until(row, "decode-1 is ready")
            await send_own()
            message = peer.hear(Tag.DECODE_REQUEST)
            assert message is not None
            own: int = message.frame.request_id  # type: ignore[attr-defined]
            action(peer, Ids(own - 1, own))  # it can but guess the other's id
            if outcome == "dropped":
                assert peer.refusal() is ErrorCode.PROTOCOL
                until(lambda: row() is None, "decode-1 is dropped")
            else:
                peer.say(Heartbeat(9, 0, 0), LOAD)
                until(lambda: (row() or {}).get("step") == 9, "what it said was read")
            if outcome == "ignored":  # now its own may go on elsewhere
                peer.say(Error(own, ErrorCode.INTERNAL), SAID)
    until(lambda: row() is None, "decode-1 is gone")


def test_a_key_is_not_heard_under_the_identity_of_another(keyed: Locked) -> None:
    for identity in (b"prefill-0-9", b"decode-10-9", b"\x00anything"):
        with closing(Hostile(keyed, "decode-1", identity)) as peer:
            peer.hello(Role.PREFILL, 0, epoch=9)
            peer.say(Drain(9, 0))
            assert peer.hear(Tag.ERROR, 0.5) is None and peer.hear(Tag.WELCOME, 0.1) is None
    assert epochs(keyed).keys() == {"prefill", "decode"}


async def test_beside_the_real_one_the_same_key_gets_nowhere(keyed: Locked) -> None:
    with closing(Hostile(keyed, "prefill-0")) as peer:
        async with two_requests(keyed) as send_own:
            await send_own()
            peer.hello()
            assert peer.refusal() is ErrorCode.FENCED
            for role, rank in ((Role.DECODE, 0), (Role.PREFILL, 1), (Role.DECODE, 1)):
                peer.hello(role, rank)
                assert peer.refusal() is ErrorCode.PROTOCOL
            for frame in (Cancel(1, 12), DecodeToken(2, 7)):
                peer.say(frame)
                assert peer.refusal() is ErrorCode.UNKNOWN_PEER
