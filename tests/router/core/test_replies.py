"""Frames of workers; the life of a request is in test_inflight, its retries in test_failover."""

from __future__ import annotations

import pytest

from tests.router.scripted import Router, first
from wire.errors import RemoteProtocolError
from wire.frames import DecodeToken, PrefillDone, Role
from wire.parts import Message


def test_frames_of_strangers_are_counted_and_change_nothing() -> None:
    router = Router()
    router.pair()
    other = router.join(Role.PREFILL, 1)
    _, sink = router.submit()
    request_id = router.prefill_id()
    router.say(other, PrefillDone(request_id, 0), first())
    router.say(other, PrefillDone(request_id + 1, 0), first())
    assert sink.events == []
    assert router.dispatcher.dropped == {"wrong_worker": 1, "unknown_request": 1}


def test_logprobs_that_do_not_match_are_a_breach() -> None:
    router = Router()
    router.pair()
    with pytest.raises(RemoteProtocolError, match="do not match"):
        router.dispatcher.on_message(b"decode-0-1", Message((DecodeToken(1, 2),), (b"\x90",)))
