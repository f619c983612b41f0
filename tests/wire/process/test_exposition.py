"""Metrics that all processes share: totals, cumulative buckets, frames by plane."""

from __future__ import annotations

from wire.errors import PeerLost
from wire.frames import Cancel
from wire.parts import encode
from wire.process.exposition import Distribution, Totals, frames
from wire.process.frame_counters import Traffic


def test_a_distribution_is_cumulative() -> None:
    distribution = Distribution("d", "help", (1, 2))
    distribution.observe(1.0)
    distribution.share(3.0, 2)
    distribution.observe(9.0)
    [family] = distribution.collect()
    buckets = [(s.labels["le"], s.value) for s in family.samples if s.name == "d_bucket"]
    assert buckets == [("1.0", 1), ("2.0", 3), ("+Inf", 4)]
    assert [s.value for s in family.samples if s.name == "d_sum"] == [13.0]


def test_totals_by_label_and_without() -> None:
    ends, slow = Totals("ends", "help", "endpoint", "outcome"), Totals("slow", "help")
    ends.counts["chat", "stop"] += 2
    [family] = ends.collect()
    assert [(s.name, tuple(s.labels.values()), s.value) for s in family.samples] == [
        ("ends_total", ("chat", "stop"), 2)
    ]
    [family] = slow.collect()
    assert [(s.labels, s.value) for s in family.samples] == [({}, 0)]  # it is there from the start


def test_frames_by_plane_tag_and_direction() -> None:
    bus, tcp = Traffic(), Traffic()
    bus.count_sent(encode(Cancel(1, 0)))
    tcp.count_received(encode(Cancel(1, 0)))
    bus.drop(PeerLost("decode-0"))
    crossed, unsent = frames({"bus": bus, "tcp": tcp})
    assert [(tuple(s.labels.values()), s.value) for s in crossed.samples] == [
        (("bus", "cancel", "sent"), 1),
        (("tcp", "cancel", "received"), 1),
    ]
    assert [(s.labels, s.value) for s in unsent.samples] == [
        ({"plane": "bus", "reason": "worker_lost"}, 1)
    ]
