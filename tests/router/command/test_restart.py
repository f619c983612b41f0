"""`baton restart`: one worker after another, then the router; those that fail are named."""

from __future__ import annotations

import pytest

from router.command.main import main
from tests.router.command.serving import Cluster, Row


def rows() -> list[Row]:
    return [
        {"role": role, "rank": 0, "state": "ready", "epoch": 7, "placed": 2}
        for role in ("prefill", "decode")
    ]


def test_workers_are_restarted_before_the_router(capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster(rows(), lambda row: row.update(epoch=8)) as cluster:
        assert main(["restart", "--url", cluster.url]) == 0
    assert cluster.asked == [
        "/v1/workers/prefill-0/restart",
        "/v1/workers/decode-0/restart",
        "/v1/router/restart",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert "no other prefill worker is ready, so requests may wait" in lines[0]
    assert [line.split(" after")[0] for line in lines[1::2]] == [
        "prefill-0: is back",
        "decode-0: is back",
        "router: the new one serves",
    ]


def test_an_any_worker_is_replaced_by_one_of_each_role(
    capsys: pytest.CaptureFixture[str],
) -> None:
    anyone = {"role": "any", "rank": 0, "state": "ready", "epoch": 7, "placed": 2}
    for others, said in ((rows(), 0), (rows()[:1], 1)):
        with Cluster([anyone.copy(), *others], lambda row: row.update(epoch=8)) as cluster:
            assert main(["restart", "--url", cluster.url, "any-0"]) == 0
        assert capsys.readouterr().out.count("no other decode worker is ready") == said


def test_named_workers_are_restarted_without_the_router() -> None:
    others = [row | {"rank": 1} for row in rows()]
    with Cluster(rows() + others, lambda row: row.update(epoch=8)) as cluster:
        assert main(["restart", "--url", cluster.url, "decode-1"]) == 0
    assert cluster.asked == ["/v1/workers/decode-1/restart"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": "lost"}, "has left and was not started again"),
        ({"state": "draining"}, "still drains with 2 requests"),
        ({"epoch": 8, "state": "suspect"}, "was started again, but is suspect"),
        ({}, "goes on as it was"),
    ],
)
def test_a_worker_that_does_not_come_back_is_named(
    change: Row, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster(rows(), lambda row: row.update(change)) as cluster:
        assert main(["restart", "--url", cluster.url, "--timeout", "0.01"]) == 1
    assert cluster.asked == ["/v1/workers/prefill-0/restart"], "the others stay as they are"
    said = capsys.readouterr().err
    assert f"prefill-0 {reason}" in said and "after 0.01 s" in said
