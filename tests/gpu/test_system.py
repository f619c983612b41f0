"""The stage of whole texts, on a CPU: it finds what is wrong, and says what the workers said."""

from __future__ import annotations

import pytest

from tests.gpu import system
from tests.gpu.settings import Settings
from tests.gpu.verify import Wrong

SETTINGS = Settings("shim", seed=3, is_quick=True)
pytestmark = pytest.mark.timeout(360)  # each starts a cluster


def test_texts_are_compared_with_the_cpu_s_also_over_a_kill() -> None:
    figures = system.system_parts(SETTINGS)["texts"]()
    assert float(figures["texts"]) >= 16


def test_texts_that_differ_are_wrong_and_the_log_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    right = system.cpu_texts

    def wrong(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        first, *rest = right(prompts, num_tokens)
        return [[*first[:-1], first[-1] + 1], *rest]

    monkeypatch.setattr(system, "cpu_texts", wrong)
    with pytest.raises(RuntimeError, match="1 of 8 texts are not the CPU's; the log ended: ") as it:
        system.system_parts(SETTINGS)["texts"]()
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
    assert system.last_lines("Segmentation fault\n") == "the log ended: Segmentation fault"
