"""Background work yields to the other threads of its process."""

from __future__ import annotations

import os
import sys

import pytest

from wire.process.background import STEPS_BACK, in_background


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere threads have no priority of their own"
)
def test_only_the_thread_of_the_work_steps_back() -> None:
    before = os.nice(0)
    assert in_background(lambda: os.nice(0)) == min(before + STEPS_BACK, 19)
    assert os.nice(0) == before


def test_an_error_of_background_work_is_raised() -> None:
    with pytest.raises(ValueError, match="no grammar"):
        in_background(lambda: int("no grammar"))
