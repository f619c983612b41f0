"""A TOML file of settings: its values as text, and the lines of its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from wire.process.config_file import TOP, Entry, read_tables


def test_values_are_what_a_flag_would_say(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(
        '# one machine\nmodel = "a b"\n\n[ router ] # faces clients\nlocal = [1, 2]\n'
        "grace_s = 1.5\ninsecure = true\n[worker]\nhost_kv_bytes = 8_000_000\n"
        "'prefix_cache'=false\n"
    )
    assert read_tables(path) == {
        TOP: {"model": Entry("a b", 2)},
        "router": {
            "local": Entry("1,2", 5),
            "grace_s": Entry("1.5", 6),
            "insecure": Entry("true", 7),
        },
        "worker": {"host_kv_bytes": Entry("8000000", 9), "prefix_cache": Entry("false", 0)},
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"model = demo", "is not TOML: .*line 1"),
        (b"model = '\xff'", "is not TOML: "),
        (b"[router.http]\nport = 1", "http is a table inside a table"),
        (b"local = [{}]", "local is a table inside a table"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (path := tmp_path / "baton.toml").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_tables(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
        read_tables(tmp_path / "none.toml")
