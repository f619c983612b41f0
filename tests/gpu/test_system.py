"""The stage of whole texts, on a CPU: it finds what is wrong, and says what the workers said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import system
from tests.gpu.settings import Settings
from tests.gpu.verify import Wrong

SETTINGS = Settings("shim", seed=3, is_quick=True)


@pytest.mark.timeout(360)  # it starts a cluster
@pytest.mark.full("it starts a cluster; run it before a GPU run")
def test_texts_are_compared_with_the_cpu_s_also_over_a_kill() -> None:
    figures = system.system_parts(SETTINGS)["texts"]()
    assert float(figures["texts"]) >= 16


def test_an_error_is_raised_with_the_end_of_the_log() -> None:
    cluster: Any = SimpleNamespace(log=lambda: "Segmentation fault\n")
    with pytest.raises(RuntimeError, match="1 of 8; the log ended: Segmentation fault") as it:
        with system.explained(cluster):
            raise Wrong("1 of 8")
    assert isinstance(it.value.__cause__, Wrong)


def test_the_last_errors_are_shown_before_other_lines() -> None:
    log = """{"event": "loading", "level": "info", "timestamp": "now", "logger": "worker"}
{"reason": "CUDA error: device-side assert triggered", "event": "failed", "level": "error"}
{"event": "broken", "level": "error", "exception": "Traceback\\n  line\\nKeyError: 3"}
{"event": "child process ended", "status": 71, "level": "warning"}
"""
    assert system.last_lines(log) == (
        "the log ended: failed reason=CUDA error: device-side assert triggered | broken KeyError: 3"
    )
    assert system.last_lines(log.splitlines()[0]) == "the log ended: loading"
