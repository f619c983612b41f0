"""Many requests that fail for one cause are few lines, and none is uncounted."""

from __future__ import annotations

import structlog
from structlog.testing import capture_logs

from wire.process.log_limit import AGAIN_S, MAX_CAUSES, PROGRESS_S, ProgressLine, RepeatedLine


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_of_a_cause_is_logged_and_the_others_are_counted() -> None:
    clock = Clock()
    line = RepeatedLine(structlog.get_logger().warning, "request failed", clock)
    always = {"event": "request failed", "log_level": "warning"}
    decode, prefill = {"stage": "decode"}, {"stage": "prefill"}
    with capture_logs() as logs:
        for request in range(128):
            line.add({"stage": "decode"}, request=request)
        line.add({"stage": "prefill"}, request=200)
        line.tick()
        assert logs == [always | decode | {"request": 0}, always | prefill | {"request": 200}]
        logs.clear()
        clock.now += AGAIN_S
        line.tick()
        assert logs == [always | decode | {"repeated": 127}]
        logs.clear()
        # It goes on, or comes again: both are one line a period.
        line.add({"stage": "decode"}, request=300)
        line.add({"stage": "prefill"}, request=301)
        line.tick()
        assert logs == [always | prefill | {"request": 301}]
        clock.now += AGAIN_S
        line.tick()
        assert logs == [always | prefill | {"request": 301}, always | decode | {"repeated": 1}]
        logs.clear()
        for _ in range(2):
            clock.now += AGAIN_S
            line.tick()
        assert logs == []
        line.add({"stage": "decode"}, request=400)
        assert logs == [always | decode | {"request": 400}]


def test_causes_that_cannot_be_remembered_are_logged_each_time() -> None:
    line = RepeatedLine(structlog.get_logger().warning, "refused", Clock())
    with capture_logs() as logs:
        for _ in range(2):
            for number in range(MAX_CAUSES + 3):
                line.add({"reason": str(number)})
    assert len(logs) == MAX_CAUSES + 2 * 3


def test_progress_is_logged_seldom_and_its_end_never() -> None:
    clock = Clock()
    with capture_logs() as logs:
        line = ProgressLine(structlog.get_logger().info, "loading weights", clock, model="m")
        for done in range(1, 100):
            line.at(done, 100)
        assert logs == []
        clock.now += PROGRESS_S
        line.at(40, 100)
        line.at(41, 100)
        clock.now += PROGRESS_S
        line.at(100, 100)
    always = {"event": "loading weights", "log_level": "info", "model": "m"}
    assert logs == [always | {"done": 40, "of": 100}]
