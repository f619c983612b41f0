"""The endpoints that a router announces in its log and in `ready_file`."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import Config
from router.endpoints import announce
from wire.process.settings import ConfigError


def test_no_reader_of_a_ready_file_sees_half(tmp_path: Path) -> None:
    """It is replaced by a whole one: who reads that of the last start goes on reading that."""
    ready = tmp_path / "ready"
    ready.write_text("of the last start")
    with ready.open() as reader:
        announce(Config(ready_file=ready), {"http": "http://127.0.0.1:1"})
        assert reader.read() == "of the last start"
    # A shell's `read` fails on a line without an end.
    assert ready.read_text() == '{"http": "http://127.0.0.1:1"}\n'
    assert list(tmp_path.iterdir()) == [ready]


@pytest.mark.parametrize("name", ["", "there"])
def test_a_ready_file_that_is_a_directory_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    ready = tmp_path / name if name else Path("/")
    with pytest.raises(ConfigError, match=f"--ready-file {ready}: cannot write it: "):
        announce(Config(ready_file=ready), {"http": "http://127.0.0.1:1"})
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not Path("/.part").exists()
