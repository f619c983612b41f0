"""A warmup says when it is over, and whether the worker can serve then."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from worker.warmup import Warmup


class Stage:
    """Two models and a clock that goes on while they warm up, and what the warmup was then."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.now_s = 100.0
        self.heard: list[tuple[bool, bool]] = []
        self.warmup = Warmup([self._load, self._warm_up], lambda: self.now_s, self._on_end)
        self._error = error

    def _load(self) -> None:
        self.now_s += 0.5

    def _warm_up(self) -> None:
        assert not self.warmup.is_over
        self.now_s += 2.5
        if self._error is not None:
            raise self._error

    def _on_end(self) -> None:
        self.heard.append((self.warmup.is_over, self.warmup.is_done))


def test_it_is_done_when_the_executor_returns() -> None:
    stage = Stage()
    with capture_logs() as logs:
        stage.warmup.run()
    assert stage.heard == [(True, True)]
    assert logs == [{"event": "warmed up", "seconds": 3.0, "log_level": "info"}]


def test_one_that_raises_is_over_and_not_done() -> None:
    stage = Stage(MemoryError("no room"))
    with capture_logs() as logs, pytest.raises(MemoryError):
        stage.warmup.run()
    assert stage.heard == [(True, False)]
    [line] = logs
    assert (line["event"], line["reason"]) == ("the warmup failed", "MemoryError: no room")


def test_even_one_that_is_ended_from_outside() -> None:
    stage = Stage(SystemExit(3))
    with pytest.raises(SystemExit):
        stage.warmup.run()
    assert stage.heard == [(True, False)]
