"""The holder of one worker's key can act on a real cluster's bus as that worker only.

A hostile peer holds the key of decode-1, prefill-1 or prefill-0.  The first two join, as they may;
the third finds the real prefill-0 alive.  Each then says what is not its to say, while one request
is held by decode-0 and another was placed on the peer itself.  Both must end as if nobody had said
anything, and the workers that are really there must stay.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
import zmq

from scripts.tcp_client import Client, connect
from tests.cluster import hash_oracle, until
from tests.scripts.key_script import keys as scripts_keys
from tests.system.locked import Locked
from wire.aio.port import client_options
from wire.errors import ErrorCode
from wire.frames import (
    ANY_RANK,
    Cancel,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Drain,
    Error,
    Frame,
    Heartbeat,
    Hello,
    PrefillDone,
    PrefillRequest,
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
    encode_prompt,
)
from wire.process.model import fingerprint, locate
from worker.executor.hash import LAYOUT

WORDS = "words of a hostile worker"
VICTIM, OWN = [11, 22, 33], [44, 55, 66, 77]
NUM_TOKENS = 5


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
        self.say(Heartbeat(0, 0, 0), encode_map(Load(total=64, used=0, cached=0, free=64)))

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
    cluster = Locked(tmp_path_factory.mktemp("one-key"), "--heartbeat-ms", "60000")
    scripts_keys(cluster.keys, "prefill-1")
    with cluster:
        yield cluster


class Requests:
    """Two raw TCP requests of one client; the first waits for its DECODE_REQUEST."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ends: dict[int, tuple[list[int], Frame]] = {}
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._read: set[int] = set()

    def ask(self, request_id: int, prompt: list[int]) -> None:
        frame = PrefillRequest(request_id, len(prompt), ANY_RANK)
        self._client.send(frame, encode_prompt(prompt, Options()))

    def go_on(self, request_id: int) -> None:
        self._client.send(DecodeRequest(request_id, NUM_TOKENS - 1))

    async def until_read(self, request_id: int) -> None:
        while request_id not in self._read:
            await self._next()

    async def tokens(self, request_id: int) -> list[int]:
        while request_id not in self._ends:
            await self._next()
        tokens, end = self._ends[request_id]
        assert isinstance(end, DecodeDone), f"request {request_id} ended with {end}"
        return tokens

    async def _next(self) -> None:
        message = await self._client.next_message()
        assert message is not None
        frame: Any = message.frame
        if isinstance(frame, PrefillDone):
            self._read.add(frame.request_id)
            self._tokens[frame.request_id].append(int.from_bytes(message.body()[:8], "little"))
        elif isinstance(frame, DecodeToken):
            self._tokens[frame.request_id].append(frame.token_id)
        else:
            assert WORDS.encode() not in bytes(message.body())
            self._ends[frame.request_id] = self._tokens[frame.request_id], frame


@asynccontextmanager
async def two_requests(cluster: Locked) -> AsyncIterator[Requests]:
    async with await connect(*cluster.tcp) as client:
        client.send(Hello.of_client(), cluster.key.encode())
        yield Requests(client)


async def check(cluster: Locked, requests: Requests, own: int = 2) -> None:
    """Both requests end as the hash executor would end them, and the real workers are there."""
    requests.go_on(1)
    for request_id, prompt in ((1, VICTIM), (own, OWN)):
        assert await requests.tokens(request_id) == hash_oracle(prompt, NUM_TOKENS, Options())
    for role in ("prefill", "decode"):
        row = cluster.find(role, 0)
        assert row is not None and row["epoch"] == epochs(cluster)[role], "it was never replaced"
    text = metrics(cluster)
    assert "NaN" not in text and WORDS not in text


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

# The key, what becomes of the frame, and the frame.
#   dropped: it ends the connection's registration; it is no worker's, or not this worker's
#   ignored: it is counted, and that is all
#   tried elsewhere: it ends this attempt of the peer's own request, and another one follows
CASES: dict[str, tuple[str, str, Action]] = {
    "HELLO as prefill-0": ("decode-1", "dropped", lambda it, ids: it.hello(Role.PREFILL, 0)),
    "CANCEL of another's request": (
        *("prefill-1", "dropped"),
        lambda it, ids: it.say(Cancel(ids.others, 12)),
    ),
    "PREFILL_DONE of a decode worker": (
        *("decode-1", "dropped"),
        lambda it, ids: it.say(PrefillDone(ids.others, 0), READ),
    ),
    "DECODE_TOKEN of a prefill worker": (
        *("prefill-1", "dropped"),
        lambda it, ids: it.say(DecodeToken(ids.own, 7)),
    ),
    "DECODE_TOKEN of another's request": (
        *("decode-1", "ignored"),
        lambda it, ids: it.say(DecodeToken(ids.others, 7)),
    ),
    "ERROR of another's request": (
        *("prefill-1", "ignored"),
        lambda it, ids: it.say(Error(ids.others, ErrorCode.INVALID_REQUEST), SAID),
    ),
    "a finish_reason of its own": (
        *("decode-1", "tried elsewhere"),
        lambda it, ids: it.say(
            DecodeDone(ids.own), msgspec.msgpack.encode({"finish_reason": WORDS})
        ),
    ),
    "KV bytes that no prompt has": (
        *("prefill-1", "tried elsewhere"),
        lambda it, ids: it.say(PrefillDone(ids.own, 2**63), READ),
    ),
}


@pytest.mark.parametrize(("key", "outcome", "action"), CASES.values(), ids=CASES)
async def test_a_worker_that_joined_does_only_what_is_its_to_do(
    keyed: Locked, key: str, outcome: str, action: Action
) -> None:
    with closing(Hostile(keyed, key)) as peer:
        async with two_requests(keyed) as requests:
            requests.ask(1, VICTIM)
            await requests.until_read(1)
            peer.join()
            until(lambda: keyed.find(*_place(peer)), f"{key} ready")
            own, ids = await _placed(peer, requests)
            action(peer, ids)
            if outcome == "dropped":
                assert peer.refusal() is ErrorCode.PROTOCOL
                until(lambda: keyed.find(*_place(peer)) is None, f"{key} dropped")
            else:
                peer.say(Heartbeat(9, 0, 0), encode_map(Load(total=64, used=0, cached=0, free=64)))
                until(lambda: _row(keyed, peer)["step"] == 9, "what it said was read")
            if outcome == "ignored":
                peer.say(
                    Error(ids.own, ErrorCode.INTERNAL), SAID
                )  # now its own may go on elsewhere
            await check(keyed, requests, own)
    until(lambda: keyed.find(*_place(peer)) is None, f"{key} gone")


def _place(peer: Hostile) -> tuple[str, int]:
    return peer.identity.role.name.lower(), peer.identity.rank


def _row(cluster: Locked, peer: Hostile) -> dict[str, Any]:
    row = cluster.find(*_place(peer))
    assert row is not None
    return row


async def _placed(peer: Hostile, requests: Requests) -> tuple[int, Ids]:
    """Have a request placed on the hostile peer; return the client's id of it, and the bus's.

    Of the ids of others it can but guess one: they do not follow from its own.
    """
    if peer.identity.role is Role.DECODE:  # decode-0 has one already
        requests.ask(2, OWN)
        requests.go_on(2)
        message = peer.hear(Tag.DECODE_REQUEST)
        assert message is not None
        return 2, Ids(message.frame.request_id - 1, message.frame.request_id)  # type: ignore[attr-defined]
    for number in range(2, 102, 2):  # prefill-0 has one for as long as it takes to read it
        requests.ask(number + 1, OWN[:2])
        requests.ask(number, OWN)
        requests.go_on(number)
        elsewhere = asyncio.create_task(requests.tokens(number))
        while not elsewhere.done():
            message = peer.hear(Tag.PREFILL_REQUEST, 0.01)
            if message is not None and message.frame.seq_len == len(OWN):  # type: ignore[attr-defined]
                elsewhere.cancel()
                await asyncio.wait([elsewhere])  # it reads no more
                own: int = message.frame.request_id  # type: ignore[attr-defined]
                return number, Ids(own - number, own)
            await asyncio.sleep(0)
        await elsewhere
    raise AssertionError("prefill-0 was too quick every time")


@pytest.mark.parametrize("identity", [b"prefill-0-9", b"decode-10-9", b"\x00anything"])
def test_a_key_is_not_heard_under_the_identity_of_another(keyed: Locked, identity: bytes) -> None:
    for key in ("decode-1", "prefill-1"):
        with closing(Hostile(keyed, key, identity)) as peer:
            peer.hello(Role.PREFILL, 0, epoch=9)
            peer.say(Drain(9, 0))
            assert peer.hear(Tag.ERROR, 0.5) is None and peer.hear(Tag.WELCOME, 0.1) is None
    assert epochs(keyed).keys() == {"prefill", "decode"}


async def test_beside_the_real_one_the_same_key_gets_nowhere(keyed: Locked) -> None:
    with closing(Hostile(keyed, "prefill-0")) as peer:
        async with two_requests(keyed) as requests:
            requests.ask(1, VICTIM)
            requests.ask(2, OWN)
            requests.go_on(2)
            await requests.until_read(1)
            peer.hello()
            assert peer.refusal() is ErrorCode.FENCED
            for role, rank in ((Role.DECODE, 0), (Role.PREFILL, 1), (Role.DECODE, 1)):
                peer.hello(role, rank)
                assert peer.refusal() is ErrorCode.PROTOCOL
            for frame in (Cancel(1, 12), DecodeToken(2, 7)):
                peer.say(frame)
                assert peer.refusal() is ErrorCode.UNKNOWN_PEER
            await check(keyed, requests)


@pytest.mark.parametrize(
    ("key", "odd"),
    [("decode-1", {"max_kv_transfer_bytes": 0}), ("prefill-1", {"max_model_len": 1})],
)
def test_a_worker_that_takes_next_to_nothing_spoils_nothing(
    keyed: Locked, key: str, odd: dict[str, Any]
) -> None:
    with closing(Hostile(keyed, key)) as peer:
        peer.hello(**odd)
        assert peer.hear(Tag.WELCOME)
        peer.say(Heartbeat(0, 0, 0), encode_map(Load(total=64, used=0, cached=0, free=64)))
        until(lambda: keyed.find(*_place(peer)), f"{key} ready")
        for _ in range(3):
            assert keyed.complete(keyed.key).status_code == 200
