"""The life both ends of a transfer share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from wire.errors import ErrorCode, LocalProtocolError, TransferFailed
from wire.frames import KvCacheAck
from wire.layout import KVLayout
from wire.payloads import Credit
from wire.transfer.lease import TRANSITIONS, Transfer, TransferState
from wire.transfer.sender import KVSender

ENDS = {TransferState.DONE, TransferState.FAILED, TransferState.CANCELLED}


def transfer() -> Transfer:
    return Transfer(1, lease_s=10.0, peer="decode-3", now=100.0)


def test_the_table_knows_every_state_and_leaves_no_end() -> None:
    assert set(TRANSITIONS) == set(TransferState)
    assert {state for state, following in TRANSITIONS.items() if not following} == ENDS
    for state in set(TransferState) - ENDS:
        assert {TransferState.FAILED, TransferState.CANCELLED} <= TRANSITIONS[state]


def test_a_lease_expires_at_its_end_and_not_before() -> None:
    one = transfer()
    assert not one.expired(109.9)
    assert one.expired(110.0) and not one.is_over
    one.fail(TransferFailed(one.peer, "silence"))
    assert one.is_over and not one.expired(1e9)


def test_the_peers_error_ends_it_with_its_code() -> None:
    one = transfer()
    one.on_error(15, "no blocks")
    assert one.state is TransferState.FAILED
    assert isinstance(one.error, TransferFailed)
    assert one.error.code is ErrorCode.OUT_OF_BLOCKS
    assert one.error.peer == "decode-3" and one.error.reason == "no blocks"


@pytest.mark.parametrize(
    ("first", "second"), list(itertools.permutations(["cancel", "error", "fail"], 2))
)
def test_the_first_end_stays(first: str, second: str) -> None:
    one = transfer()
    acts: dict[str, Callable[[], None]] = {
        "cancel": one.cancel,
        "error": partial(one.on_error, 1, "theirs"),
        "fail": partial(one.fail, TransferFailed("us", "ours")),
    }
    acts[first]()
    end = (one.state, one.error)
    acts[second]()
    assert (one.state, one.error) == end and one.is_over


def test_a_frame_of_another_transfer_is_our_own_mistake() -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype="uint8")
    one = KVSender(1, layout, range(4), max_bytes=64, lease_s=10.0, now=100.0)
    with pytest.raises(LocalProtocolError, match="frame of 2 given to transfer 1"):
        one.on_ack(KvCacheAck(2, 0), Credit(0, 0, 0), 101.0)
