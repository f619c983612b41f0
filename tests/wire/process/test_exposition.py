"""What metrics have in common: cumulative buckets, frames by plane."""

from __future__ import annotations

from wire.errors import PeerLost
from wire.frames import Cancel
from wire.parts import encode
from wire.process.exposition import Distribution, frames
from wire.process.traffic import Traffic


def test_a_distribution_is_cumulative() -> None:
    distribution = Distribution("d", "help", (1, 2))
    for value, times in ((1.0, 1), (1.5, 2), (9.0, 1)):
        distribution.observe(value, times)
    [family] = distribution.collect()
    buckets = [(s.labels["le"], s.value) for s in family.samples if s.name == "d_bucket"]
    assert buckets == [("1.0", 1), ("2.0", 3), ("+Inf", 4)]


def test_observations_may_share_a_sum() -> None:
    one, other = (Distribution("d", "help", (1, 2)) for _ in range(2))
    one.observe(1.5, 2)
    other.share(3.0, 2)
    assert list(one.collect()) == list(other.collect())


def test_frames_by_plane_tag_and_direction() -> None:
    bus, tcp = Traffic(), Traffic()
    bus.say(encode(Cancel(1, 0)))
    tcp.hear(encode(Cancel(1, 0)))
    bus.drop(PeerLost("decode-0"))
    crossed, unsent = frames({"bus": bus, "tcp": tcp})
    assert [(tuple(s.labels.values()), s.value) for s in crossed.samples] == [
        (("bus", "cancel", "sent"), 1),
        (("tcp", "cancel", "received"), 1),
    ]
    assert [(s.labels, s.value) for s in unsent.samples] == [
        ({"plane": "bus", "reason": "worker_lost"}, 1)
    ]
