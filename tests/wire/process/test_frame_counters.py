"""Counting frames: tokens one by one, nonsense as one entry."""

from wire.errors import PeerLost
from wire.frames import Cancel, DecodeToken
from wire.parts import TAG, encode
from wire.process.frame_counters import Traffic


def test_every_token_of_a_message_is_a_frame() -> None:
    traffic = Traffic()
    traffic.count_sent(encode([DecodeToken(1, 5), DecodeToken(2, 6)]))
    traffic.count_sent(encode(Cancel(1, 0)))
    traffic.count_received(encode(Cancel(1, 0), b"x"))
    assert sorted(traffic.rows()) == [
        ("cancel", "received", 1),
        ("cancel", "sent", 1),
        ("decode_token", "sent", 2),
    ]


def test_tags_that_do_not_exist_are_one_entry() -> None:
    traffic = Traffic()
    traffic.count_received([TAG.pack(44), b""])  # without its header
    assert list(traffic.rows()) == [("cancel", "received", 1)]
    for parts in (
        [],
        [b"x"],
        [TAG.pack(44)],
        [b"\x01\0\0", b""],
        *([bytes([n, 1, 0, 0]), b""] for n in range(9)),
    ):
        traffic.count_received(parts)
    assert list(traffic.rows()) == [("cancel", "received", 1), ("unknown", "received", 13)]


def test_unsent_frames_are_counted_by_reason() -> None:
    traffic = Traffic()
    traffic.drop(PeerLost("decode-3"))
    assert (dict(traffic.dropped), list(traffic.rows())) == ({"worker_lost": 1}, [])
