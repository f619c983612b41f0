"""Requests of the operators' commands: keys, errors, and routers that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.command import operator
from router.command.client import Client
from router.command.operator import connect, parser, wait_until, workers
from tests.router.command.serving import Cluster

ROW = {"role": "decode", "rank": 3, "state": "ready", "epoch": 7, "placed": 0}


def test_lost_workers_are_not_listed() -> None:
    with Cluster([ROW, ROW | {"rank": 4, "state": "lost"}]) as cluster:
        assert workers(Client(cluster.url + "/")) == {"decode-3": ROW}


def test_the_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nsk-file\nsk-second\n")
    monkeypatch.setenv("BATON_API_KEY", "sk-environment")
    with Cluster([ROW]) as cluster:
        for flags, key in (((), "sk-environment"), (("--api-key-file", str(keys)), "sk-file")):
            args = parser("drain", "").parse_args(["--url", cluster.url, *flags])
            workers(connect(args))
            assert cluster.keys[-1] == f"Bearer {key}"
        workers(Client(cluster.url))
        assert cluster.keys[-1] is None


def test_waiting_ends_with_the_condition_or_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "LOOK_S", 0.0)
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 60.0)
    assert not wait_until(lambda: False, 0.0)
