"""Raw TCP: a real connection, and a scripted worker behind a router without sockets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router import tcp
from router.core.state import Limits
from router.tcp import MAX_ENDED
from scripts.tcp_client import Client, connect
from tests.circles import circles
from tests.router.scripted import Router, first, usage
from wire.aio.tcp import Limits as TcpLimits
from wire.aio.tcp import serve
from wire.errors import ErrorCode
from wire.frames import (
    ANY_RANK,
    AS_MANY_AS_FIT,
    Cancel,
    DecodeDone,
    DecodeRequest,
    DecodeToken,
    Drain,
    Error,
    Frame,
    Hello,
    PrefillDone,
    PrefillRequest,
    Role,
    Tag,
)
from wire.options import Options
from wire.parts import Buffer, Message
from wire.payloads import (
    ErrorDetail,
    Logprobs,
    Usage,
    decode_continuation,
    decode_map,
    decode_prefill_result,
    decode_prompt,
    encode_map,
    encode_prompt,
)
from wire.process.api_keys import ApiKeys, digest

P, D = b"prefill-0-1", b"decode-0-1"
KEY, OTHER = "sk-" + "k" * 40, "sk-" + "o" * 40


class Router2(Router):
    """A scripted router that tells when something was sent to a worker."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.port = 0
        self.changed = asyncio.Event()

    def transmit(self, peer: bytes, parts: list[Buffer]) -> None:
        super().transmit(peer, parts)
        self.changed.set()

    async def hear(self, tag: Tag) -> list[tuple[bytes, Message]]:
        while not (taken := self.take(tag)):
            await self.changed.wait()
            self.changed.clear()
        return taken

    async def request_id(self) -> int:
        [(_, message)] = await self.hear(Tag.PREFILL_REQUEST)
        return message.frame.request_id  # type: ignore[attr-defined, no-any-return]

    async def cache_salt(self) -> str:
        [(_, message)] = await self.hear(Tag.PREFILL_REQUEST)
        assert isinstance(message.frame, PrefillRequest)
        return decode_prompt(message.body(), message.frame.seq_len)[1].cache_salt


@asynccontextmanager
async def face(
    limits: Limits | None = None, max_requests: int = 8, api_keys: ApiKeys | None = None
) -> AsyncIterator[tuple[Router2, Client]]:
    router = Router2(limits)
    router.pair()
    server = await serve(
        "127.0.0.1",
        0,
        lambda connection: tcp.Client(connection, router.dispatcher, max_requests, api_keys),
        TcpLimits(max_connections=4),
    )
    try:
        async with await connect("127.0.0.1", server.port) as client:
            router.port = server.port
            yield router, client
    finally:
        await server.close(1.0)


def ask(client: Client, request_id: int, prompt: int = 3, **options: object) -> None:
    payload = encode_prompt(range(prompt), Options(**options))  # type: ignore[arg-type]
    client.send(PrefillRequest(request_id, prompt, ANY_RANK), payload)


async def hear(client: Client) -> Message:
    message = await client.next_message()
    assert message is not None
    return message


async def test_a_request_is_remembered_by_the_client_s_address_and_id() -> None:
    async with face() as (router, client):
        ask(client, 7)
        await router.request_id()
        [attempt] = router.dispatcher.attempts.values()
        record, history = attempt.state.record, router.dispatcher.history
        assert record is not None
        assert re.fullmatch(r"tcp-127\.0\.0\.1:[0-9]+-7", record.name)
        assert history.find(record.name, "127.0.0.1") == [record]
        assert history.find(record.name, "10.0.0.9") == []


async def error(client: Client) -> tuple[int, int, ErrorDetail]:
    message = await hear(client)
    assert isinstance(message.frame, Error), message
    return message.frame.request_id, message.frame.code, decode_map(ErrorDetail, message.body())


@pytest.mark.parametrize("is_pipelined", [True, False])
async def test_a_client_gets_its_tokens_under_its_own_id(is_pipelined: bool) -> None:
    async with face() as (router, client):
        ask(client, 7, logprobs=0)
        if is_pipelined:
            client.send(DecodeRequest(7, 2))
        request_id = await router.request_id()
        router.say(P, PrefillDone(request_id, 192), first(5))
        message = await hear(client)
        assert message.frame == PrefillDone(7, 192)
        assert decode_prefill_result(message.body()).token_id == 5
        if not is_pipelined:
            client.send(DecodeRequest(7, 2))
        [(_, message)] = await router.hear(Tag.DECODE_REQUEST)
        assert message.frame == DecodeRequest(request_id, 2)
        router.say(D, [DecodeToken(request_id, 8)])
        router.say(D, [DecodeToken(request_id, 9)], encode_map([Logprobs(logprob=-0.5)]))
        router.say(D, DecodeDone(request_id), usage())
        assert await hear(client) == Message(DecodeToken(7, 8), (), ((7, 8),))
        message = await hear(client)
        assert message.frame == DecodeToken(7, 9)
        assert decode_map(list[Logprobs], message.body()) == [Logprobs(logprob=-0.5)]
        message = await hear(client)
        assert message.frame == DecodeDone(7)
        assert decode_map(Usage, message.body()).completion_tokens == 3
        router.assert_idle()


async def test_a_first_token_that_is_the_last_is_followed_by_the_end() -> None:
    async with face() as (router, client):
        ask(client, 1)
        router.say(P, PrefillDone(await router.request_id(), 0), first(5, "stop"))
        assert (await hear(client)).tag is Tag.PREFILL_DONE
        message = await hear(client)
        assert message.frame == DecodeDone(1)
        assert decode_map(Usage, message.body()).finish_reason == "stop"
        client.send(DecodeRequest(1, 5))  # It crossed the end: nothing happens.
        client.send(Cancel(1, 0))
        ask(client, 1)  # And the id may be used again.
        router.say(P, PrefillDone(await router.request_id(), 0), first(5, "length"))
        assert [(await hear(client)).tag for _ in range(2)] == [Tag.PREFILL_DONE, Tag.DECODE_DONE]


@pytest.mark.parametrize(
    ("prompt", "code"), [(0, ErrorCode.INVALID_REQUEST), (1000, ErrorCode.CONTEXT_LENGTH_EXCEEDED)]
)
async def test_a_refusal_comes_at_once_and_the_connection_goes_on(
    prompt: int, code: ErrorCode
) -> None:
    async with face() as (router, client):
        ask(client, 3, prompt)
        client.send(DecodeRequest(3, 5))
        request_id, answered, detail = await error(client)
        assert (request_id, answered, detail.retry_after_s) == (3, code, None)
        ask(client, 4)
        await router.request_id()


async def test_a_prompt_that_is_too_long_is_refused_before_its_ids_are_read() -> None:
    """So it is while the workers are away: asking again would not help."""
    async with face() as (router, client):
        router.bus.on_lost(P)
        router.bus.on_lost(D)
        client.send(PrefillRequest(3, 1_000_000, ANY_RANK), b"no ids at all")
        request_id, code, detail = await error(client)
        assert (request_id, code) == (3, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
        assert "has 1000000" in detail.message
        assert router.bus.dispatcher.rejected == {"context_length_exceeded": 1}


async def test_bad_options_end_the_request_only() -> None:
    async with face() as (router, client):
        client.send(PrefillRequest(3, 1, ANY_RANK), b"\0\0\0\0\x81\xa3hot\x01")
        assert (await error(client))[:2] == (3, ErrorCode.INVALID_REQUEST)
        client.send(PrefillRequest(4, 1, 12), encode_prompt([1], Options()))
        request_id, code, detail = await error(client)
        assert (request_id, code) == (4, ErrorCode.INVALID_REQUEST) and "router" in detail.message
        ask(client, 5)
        await router.request_id()


async def test_a_connection_has_a_bounded_number_of_requests() -> None:
    async with face(max_requests=2) as (router, client):
        for request_id in (1, 2, 3):
            ask(client, request_id)
        assert (await error(client))[:2] == (3, ErrorCode.OVERLOADED)
        client.send(Cancel(1, 0))
        await router.hear(Tag.CANCEL)
        ask(client, 4)
        await router.hear(Tag.PREFILL_REQUEST)


async def test_cancel_reaches_both_workers_and_is_not_answered() -> None:
    async with face() as (router, client):
        ask(client, 1)
        request_id = await router.request_id()
        client.send(Cancel(1, ErrorCode.CANCELLED))
        client.send(Cancel(99, 0))  # Unknown ids are ignored.
        cancelled = await router.hear(Tag.CANCEL)
        assert {peer for peer, _ in cancelled} == {P, D}
        router.say(P, PrefillDone(request_id, 0), first())
        client.send(DecodeRequest(98, 1))
        assert (await error(client))[:2] == (98, ErrorCode.UNKNOWN_REQUEST)
        router.assert_idle()


async def test_nothing_of_a_connection_that_ended_waits_for_the_garbage_collector() -> None:
    async with face() as (router, _):
        with circles() as found:
            for request_id in (1, 2, 3):  # of the last one, the server may not have seen the end
                async with await connect("127.0.0.1", router.port) as leaving:
                    ask(leaving, request_id)
                    await router.hear(Tag.PREFILL_REQUEST)
                while not router.take(Tag.CANCEL):
                    await router.changed.wait()
                    router.changed.clear()
        assert not found


@pytest.mark.parametrize(
    ("frame", "payload"),
    [
        (PrefillRequest(0, 1, ANY_RANK), b"\0\0\0\0"),
        (PrefillRequest(1, 9, ANY_RANK), b"short"),
        (Hello(1, 2, Role.DECODE), b""),
        (Hello(0, 0, Role.CLIENT, version=2), b"key"),
        (Hello.of_client(), b"key"),  # late
        (Drain(1, 1), b""),
        (DecodeToken(1, 1), b""),
    ],
)
async def test_a_breach_is_named_and_ends_the_connection(frame: Frame, payload: bytes) -> None:
    async with face() as (router, client):
        ask(client, 5)
        await router.request_id()
        client.send(frame, payload)
        request_id, code, _ = await error(client)
        assert (request_id, code) == (0, ErrorCode.PROTOCOL)
        assert await client.next_message() is None
        await router.hear(Tag.CANCEL)
        router.assert_idle()


async def test_one_id_cannot_be_open_twice() -> None:
    async with face() as (_router, client):
        ask(client, 5)
        ask(client, 5)
        assert (await error(client))[:2] == (0, ErrorCode.PROTOCOL)


async def test_a_second_decode_request_is_a_breach() -> None:
    async with face() as (_router, client):
        ask(client, 5)
        client.send(DecodeRequest(5, 1))
        client.send(DecodeRequest(5, 1))
        assert (await error(client))[:2] == (0, ErrorCode.PROTOCOL)


@pytest.mark.parametrize(
    ("prompt", "options", "count"),
    [(3, {}, 996), (998, {}, 1), (3, {"max_tokens": 5}, 4), (3, {"max_tokens": 997}, 996)],
)
@pytest.mark.parametrize("is_pipelined", [True, False])
async def test_a_client_may_ask_for_as_many_tokens_as_fit(
    prompt: int, options: dict[str, int], count: int, is_pipelined: bool
) -> None:
    """The context has 1000 tokens; a worker is told a number."""
    async with face() as (router, client):
        ask(client, 1, prompt, **options)
        if is_pipelined:
            client.send(DecodeRequest(1, AS_MANY_AS_FIT))
        request_id = await router.request_id()
        router.say(P, PrefillDone(request_id, 64 * prompt), first(5))
        assert (await hear(client)).tag is Tag.PREFILL_DONE
        if not is_pipelined:
            client.send(DecodeRequest(1, AS_MANY_AS_FIT))
        [(_, message)] = await router.hear(Tag.DECODE_REQUEST)
        assert message.frame == DecodeRequest(request_id, count)
        _, told = decode_continuation(message.body())
        assert told.max_tokens == count + 1


async def test_ended_requests_are_bounded() -> None:
    async with face() as (_router, client):
        for request_id in range(1, MAX_ENDED + 3):
            ask(client, request_id, 0)
            await error(client)
        client.send(DecodeRequest(2, 1))
        assert (await error(client))[:2] == (2, ErrorCode.UNKNOWN_REQUEST)
        client.send(DecodeRequest(3, 1))
        client.send(DecodeRequest(1, 1))
        assert (await error(client))[:2] == (1, ErrorCode.UNKNOWN_REQUEST)


def hello(client: Client, key: str) -> None:
    client.send(Hello.of_client(), key.encode())


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "api_keys"
    path.write_text(f"{KEY}\n{OTHER}\n")
    path.chmod(0o600)
    return path


def revoke(key_file: Path) -> None:
    key_file.write_text(f"{OTHER}\n")


async def test_a_key_in_hello_opens_the_connection_until_it_is_revoked(key_file: Path) -> None:
    async with face(api_keys=ApiKeys(key_file)) as (router, client):
        hello(client, KEY)
        ask(client, 1, 2000)  # bigger than what is taken before HELLO
        assert (await error(client))[:2] == (1, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
        ask(client, 1)
        await router.request_id()
        revoke(key_file)
        ask(client, 2)
        assert (await error(client))[:2] == (0, ErrorCode.UNAUTHORIZED)
        assert await client.next_message() is None
        cancelled = await router.hear(Tag.CANCEL)
        assert {peer for peer, _ in cancelled} == {P, D}, "its request ended with it"


@pytest.mark.parametrize("shares", [True, False])
async def test_the_salt_for_workers_depends_on_the_key(key_file: Path, *, shares: bool) -> None:
    async with face(api_keys=ApiKeys(key_file, shares_prefixes=shares)) as (router, client):
        hello(client, KEY)
        salts = []
        for request_id, requested in enumerate(("", "mine"), 1):
            ask(client, request_id, cache_salt=requested)
            salts.append(await router.cache_salt())
    key_digest = digest(KEY.encode())
    expected = [ApiKeys(key_file).cache_salt(key_digest, each) for each in ("", "mine")]
    assert salts == (["", "mine"] if shares else expected)


async def test_without_keys_the_salt_is_the_client_s() -> None:
    async with face() as (router, client):
        hello(client, KEY)  # which nobody asked for
        ask(client, 1, cache_salt="mine")
        assert await router.cache_salt() == "mine"


@pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], KEY + "x", KEY.upper()])
async def test_a_wrong_key_is_an_error_and_the_end(key_file: Path, key: str) -> None:
    async with face(api_keys=ApiKeys(key_file)) as (router, client):
        hello(client, key)
        ask(client, 1)
        request_id, code, detail = await error(client)
        assert (request_id, code) == (0, ErrorCode.UNAUTHORIZED)
        assert not key or key not in detail.message
        assert await client.next_message() is None
        assert router.take(Tag.PREFILL_REQUEST) == []


@pytest.mark.parametrize(
    "frame", [PrefillRequest(1, 3, ANY_RANK), DecodeRequest(1, 2), Cancel(1, 0)]
)
async def test_without_a_key_every_frame_ends_the_connection(
    key_file: Path, frame: PrefillRequest | DecodeRequest | Cancel
) -> None:
    async with face(api_keys=ApiKeys(key_file)) as (router, client):
        client.send(frame)
        assert (await error(client))[:2] == (0, ErrorCode.UNAUTHORIZED)
        assert await client.next_message() is None
        assert router.take(Tag.PREFILL_REQUEST) == []


async def test_before_hello_a_frame_is_small(key_file: Path) -> None:
    async with face(api_keys=ApiKeys(key_file)) as (_, client):
        ask(client, 1, 2000)
        request_id, code, detail = await error(client)
        assert (request_id, code) == (0, ErrorCode.PROTOCOL)
        assert "to 4096" in detail.message


async def heard(client: Client) -> None:
    """Return when the router has taken all that this client said."""
    client.send(DecodeRequest(99, 1))
    assert (await error(client))[:2] == (99, ErrorCode.UNKNOWN_REQUEST)


async def turns(router: Router2, count: int) -> list[int]:
    """Answer each prompt with its only token, one after another; return their lengths in turn."""
    lengths = []
    for _ in range(count):
        [(_, message)] = await router.hear(Tag.PREFILL_REQUEST)
        assert isinstance(message.frame, PrefillRequest)
        lengths.append(message.frame.seq_len)
        router.say(P, PrefillDone(message.frame.request_id, 0), first(finish_reason="length"))
    return lengths


async def test_a_key_that_floods_by_many_connections_leaves_the_other_its_turns(
    key_file: Path,
) -> None:
    limits = Limits(max_running_per_worker=1)
    async with (
        face(limits, api_keys=ApiKeys(key_file)) as (router, flood),
        await connect("127.0.0.1", router.port) as same_key,
        await connect("127.0.0.1", router.port) as other_key,
    ):
        for client, key in ((flood, KEY), (same_key, KEY), (other_key, OTHER)):
            hello(client, key)
        for prompt in (11, 12, 13):
            ask(flood, prompt, prompt)
        await heard(flood)
        ask(same_key, 14, 14)
        await heard(same_key)
        for prompt in (21, 22):
            ask(other_key, prompt, prompt)
        await heard(other_key)
        assert await turns(router, 6) == [11, 12, 21, 13, 22, 14]


async def test_without_keys_an_address_is_one_client_whatever_its_ports() -> None:
    async with face() as (router, one), await connect("127.0.0.1", router.port) as other:
        for client in (one, other):
            hello(client, KEY)  # nobody has checked what it says
            ask(client, 1)
            await heard(client)
    assert [end.client for end in router.ends.ends] == ["127.0.0.1"] * 2
