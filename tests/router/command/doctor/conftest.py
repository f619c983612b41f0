"""An environment of its own for each check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.router.command.doctor.planted import isolate


@pytest.fixture(autouse=True)
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Isolate the settings, and put the log back as it was."""
    isolate(monkeypatch, tmp_path)
    before = structlog.get_config()
    yield
    structlog.configure(**before)
