"""`baton drain`: what it says, and for whom it waits."""

from __future__ import annotations

import pytest

from router.command.main import main
from tests.router.command.serving import Cluster, Row

ROWS = [
    {"role": "decode", "rank": rank, "state": "ready", "epoch": 7, "placed": rank}
    for rank in range(3)
]


@pytest.mark.parametrize("is_waiting", [True, False])
def test_workers_drain(is_waiting: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def leave(row: Row) -> None:
        if is_waiting:
            cluster.rows.remove(row)

    with Cluster([*ROWS], leave) as cluster:
        flags = ["--url", cluster.url, *(["--wait"] if is_waiting else [])]
        assert main(["drain", *flags, "decode-0", "decode-2"]) == 0
    assert cluster.asked == ["/v1/workers/decode-0/drain", "/v1/workers/decode-2/drain"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"decode-{it}: drains, requests under way: {it}" for it in (0, 2)]
    assert lines[2:] == (["all have left"] if is_waiting else [])


def test_those_that_stay_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster([*ROWS]) as cluster:
        flags = ["--url", cluster.url, "--wait", "--timeout", "0.01"]
        assert main(["drain", *flags, "decode-0", "decode-1"]) == 1
    assert "decode-0, decode-1 did not leave in 0.01 s" in capsys.readouterr().err
