"""A worker gone bad, as the router's core meets it: what it says of a request that cannot be true.

Each case is said to a real core with two workers of a role.  The request must go on elsewhere, and
its client must hear nothing but what is true.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack

import msgspec
import pytest
import structlog

from router.core.replies import MAX_LOGGED, SENTENCES
from router.core.state import Limits
from tests.router.scripted import RecordingSink, Router, first
from wire.errors import ErrorCode
from wire.frames import DecodeDone, DecodeToken, Error, PrefillDone, Role, Tag
from wire.logprobs import join_prompt_logprobs, pack_logprobs
from wire.payloads import ErrorDetail, Logprobs, PrefillResult, Usage, encode_map
from wire.payloads import encode_prefill_result as read
from wire.process.log_limit import AGAIN_S

VOCAB = 100
PROMPT = 20
# Of tests.router.scripted.LAYOUT.
TOKEN_BYTES = 64
SECRET = "words of a worker"
ROW = pack_logprobs(Logprobs(logprob=-1.0, top=((7, -1.0),)))
BAD_ROW = pack_logprobs(Logprobs(logprob=-1.0, top=((VOCAB, -1.0),)))


@pytest.fixture
def router() -> Router:
    made = Router(Limits(vocab_size=VOCAB, max_attempts=2))
    for rank in (0, 1):
        made.join(Role.PREFILL, rank)
        made.join(Role.DECODE, rank)
    made.sent.clear()
    return made


def asked(router: Router, tag: Tag) -> tuple[bytes, int]:
    """Whom the router asked, and under which id."""
    [(peer, message)] = router.take(tag)
    return peer, message.frame.request_id  # type: ignore[attr-defined]


def is_tried_elsewhere(router: Router, tag: Tag, bad: bytes) -> bool:
    """Whether another attempt follows, and not on the bad worker."""
    router.now += 1.0
    router.dispatcher.tick()
    peer, request_id = asked(router, Tag.PREFILL_REQUEST)
    if tag is Tag.PREFILL_REQUEST:
        return peer != bad
    router.say(peer, PrefillDone(request_id, 0), first())
    return asked(router, Tag.DECODE_REQUEST)[0] != bad


@pytest.mark.parametrize(
    ("kv_bytes", "result"),
    [
        (0, read(PrefillResult(token_id=VOCAB))),
        (0, pack("<q", 2**63 - 1)),
        (0, pack("<q", 7) + msgspec.msgpack.encode({"finish_reason": SECRET})),
        (0, pack("<q", 7) + msgspec.msgpack.encode({"stop_token_id": 7})),
        (0, read(PrefillResult(token_id=7, finish_reason="stop", stop_token_id=VOCAB))),
        (0, read(PrefillResult(token_id=7, cached_tokens=PROMPT + 1))),
        (PROMPT * TOKEN_BYTES + 1, first()),
        (0, read(PrefillResult(token_id=7, logprobs=Logprobs(logprob=-1.0, top=((7, -1.0),) * 2)))),
        (0, read(PrefillResult(token_id=7, logprobs=Logprobs(logprob=float("nan"))))),
        (0, read(PrefillResult(token_id=7, logprobs=Logprobs(logprob=-1.0, top=((VOCAB, -1.0),))))),
        (0, read(PrefillResult(token_id=7, prompt_logprobs=join_prompt_logprobs(1, 20 * [ROW])))),
        (
            0,
            read(
                PrefillResult(token_id=7, prompt_logprobs=join_prompt_logprobs(1, 19 * [BAD_ROW]))
            ),
        ),
        (0, read(PrefillResult(token_id=7, prompt_logprobs=pack("<I", 2) + bytes(19 * 20)))),
    ],
)
def test_an_impossible_prefill_done_moves_the_request(
    router: Router, kv_bytes: int, result: bytes
) -> None:
    _, sink = router.submit(PROMPT, logprobs=1, prompt_logprobs=1)
    bad, request_id = asked(router, Tag.PREFILL_REQUEST)
    router.say(bad, PrefillDone(request_id, kv_bytes), result)
    assert sink.events == []
    assert is_tried_elsewhere(router, Tag.PREFILL_REQUEST, bad)
    assert router.dispatcher.failovers == {"internal": 1}


def test_valid_results_reach_the_client(router: Router) -> None:
    _, sink = router.submit(PROMPT, logprobs=1, prompt_logprobs=1)
    peer, request_id = asked(router, Tag.PREFILL_REQUEST)
    scores = Logprobs(logprob=-1.0, top=((VOCAB - 1, -1.0),))
    result = PrefillResult(
        token_id=VOCAB - 1,
        cached_tokens=PROMPT,
        logprobs=scores,
        prompt_logprobs=join_prompt_logprobs(1, 19 * [ROW]),
    )
    router.say(peer, PrefillDone(request_id, PROMPT * TOKEN_BYTES), read(result))
    decoder, _ = asked(router, Tag.DECODE_REQUEST)
    router.say(decoder, [DecodeToken(request_id, VOCAB - 1)], encode_map([scores]))
    router.now += 2.0
    true = Usage(
        finish_reason="stop",
        kv_bytes=PROMPT * TOKEN_BYTES,
        kv_seconds=1.5,
        stop_token_id=7,
        stop_logprobs=scores,
    )
    router.say(decoder, DecodeDone(request_id), encode_map(true))
    assert sink.kinds == ["prefill", "token", "done"] and sink.usage.kv_seconds == 1.5
    assert sink.events[0] == ("prefill", result)
    assert sink.usage.stop_logprobs == scores


def stopped(top: tuple[tuple[int, float], ...]) -> Usage:
    scores = Logprobs(logprob=-1.0, top=top)
    return Usage(finish_reason="stop", stop_token_id=7, stop_logprobs=scores)


def decoding(router: Router) -> tuple[RecordingSink, bytes, int]:
    _, sink = router.submit(PROMPT, new=5, logprobs=1)
    peer, request_id = asked(router, Tag.PREFILL_REQUEST)
    router.say(peer, PrefillDone(request_id, 0), first())
    return sink, asked(router, Tag.DECODE_REQUEST)[0], request_id


@pytest.mark.parametrize(
    "say",
    [
        lambda i: ([DecodeToken(i, VOCAB)],),
        lambda i: (
            [DecodeToken(i, 7)],
            encode_map([Logprobs(logprob=-1.0, top=((7, -1.0), (8, -1.0)))]),
        ),
        lambda i: ([DecodeToken(i, 7)], encode_map([Logprobs(logprob=-1.0, top=((VOCAB, -1.0),))])),
        lambda i: (DecodeDone(i), msgspec.msgpack.encode({"finish_reason": SECRET})),
        lambda i: (
            DecodeDone(i),
            msgspec.msgpack.encode({"finish_reason": "stop", "kv_seconds": float("nan")}),
        ),
        lambda i: (
            DecodeDone(i),
            encode_map(Usage(finish_reason="stop", kv_bytes=PROMPT * TOKEN_BYTES + 1)),
        ),
        lambda i: (DecodeDone(i), encode_map(Usage(finish_reason="stop", kv_skipped_tokens=21))),
        lambda i: (DecodeDone(i), encode_map(Usage(finish_reason="stop", stop_token_id=VOCAB))),
        lambda i: (DecodeDone(i), encode_map(Usage(finish_reason="length", stop_token_id=7))),
        lambda i: (DecodeDone(i), encode_map(stopped(((VOCAB, -1.0),)))),
    ],
)
def test_an_impossible_decode_frame_moves_the_request(
    router: Router, say: Callable[[int], tuple[object, ...]]
) -> None:
    sink, bad, request_id = decoding(router)
    router.say(bad, *say(request_id))  # type: ignore[arg-type]
    assert sink.kinds == ["prefill"]
    assert is_tried_elsewhere(router, Tag.DECODE_REQUEST, bad)
    assert router.fleet.get(bad) is not None, "only this request is taken from it"


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode([{"logprob": float("nan")}]),
        msgspec.msgpack.encode([{"logprob": -1.0, "top": [[7, -1.0]] * 21}]),
        msgspec.msgpack.encode([{"logprob": -1.0, SECRET: 1}]),
        encode_map([None, None]),
    ],
)
def test_a_step_that_cannot_be_read_drops_its_worker(router: Router, payload: bytes) -> None:
    sink, bad, request_id = decoding(router)
    router.say(bad, [DecodeToken(request_id, 7)], payload)
    assert sink.kinds == ["prefill"]
    assert router.fleet.get(bad) is None and router.forgotten == [bad]
    assert is_tried_elsewhere(router, Tag.DECODE_REQUEST, bad)


def test_times_are_no_longer_than_the_router_waited(router: Router) -> None:
    sink, peer, request_id = decoding(router)
    router.now += 3.0
    said = Usage(finish_reason="stop", kv_seconds=2e6, kv_transfer_seconds=1.0)
    router.say(peer, DecodeDone(request_id), encode_map(said))
    assert (sink.usage.kv_seconds, sink.usage.kv_transfer_seconds) == (3.0, 1.0)
    assert [end.kv_seconds for end in router.ends.ends] == [3.0]


@pytest.mark.parametrize("code", list(ErrorCode))
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_error_of_a_worker_is_in_our_words_or_not_its_to_say(
    code: ErrorCode, role: Role
) -> None:
    router = Router(Limits(max_attempts=1))
    peers = dict(zip((Role.PREFILL, Role.DECODE), router.pair(), strict=True))
    _, sink = router.submit()
    error = Error(router.prefill_id(), code)
    router.say(peers[role], error, encode_map(ErrorDetail(message=SECRET, param=SECRET)))
    other = peers[Role.DECODE if role is Role.PREFILL else Role.PREFILL]
    assert other in {peer for peer, _ in router.take(Tag.CANCEL)}
    assert SECRET not in sink.error.message
    if code in SENTENCES:
        assert sink.error.code is code and sink.error.message.startswith(SENTENCES[code])
    else:
        assert sink.error.code is ErrorCode.INTERNAL
        assert sink.error.message == f"{role.name.lower()}-0 broke the protocol"


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "advice"),
    [(60, 9, "lower max_tokens"), (9, 9, "try again")],
)
def test_what_is_too_large_for_the_blocks_of_a_worker_is_named(
    num_prompt: int, num_new: int, advice: str
) -> None:
    router = Router(Limits(max_attempts=1))
    router.join(Role.PREFILL)
    peer = router.join(Role.DECODE, num_blocks=4)  # of 16 tokens
    _, sink = router.submit(num_prompt, num_new - 1)
    error = Error(router.prefill_id(), ErrorCode.OUT_OF_BLOCKS)
    router.say(peer, error, encode_map(ErrorDetail(message=SECRET)))
    assert f"; {advice}" in sink.error.message


def test_the_words_of_a_worker_are_cut_in_the_log() -> None:
    router = Router(Limits(max_attempts=1))
    peer, _ = router.pair()
    router.submit()
    said = encode_map(ErrorDetail(message=4096 * "x"))
    with structlog.testing.capture_logs() as lines:
        router.say(peer, Error(router.prefill_id(), ErrorCode.INTERNAL), said)
    assert [line["reason"] for line in lines if "reason" in line] == [MAX_LOGGED * "x"]


def test_repeated_refusals_are_one_log_line_with_a_count() -> None:
    router = Router(Limits(max_attempts=1))
    peer, _ = router.pair()
    said = encode_map(ErrorDetail(message="no such grammar"))
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            router.submit()
            error = Error(router.prefill_id(), ErrorCode.INVALID_REQUEST)
            router.say(peer, error, said)
            router.sent.clear()
        router.now += AGAIN_S
        router.dispatcher.tick()
    refused = [line for line in lines if line["event"] == "worker refused"]
    assert [line.get("repeated") for line in refused] == [None, 2]
    assert {(line["code"], line["reason"]) for line in refused} == {
        ("invalid_request", "no such grammar")
    }


def test_only_the_router_sends_these_errors() -> None:
    """A client would blame itself or the router for them."""
    assert set(ErrorCode) - set(SENTENCES) == {
        ErrorCode.UNAUTHORIZED,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.CANCELLED,
        ErrorCode.UNKNOWN_PEER,
        ErrorCode.FENCED,
    }
