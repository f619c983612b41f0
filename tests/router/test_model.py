from __future__ import annotations

from pathlib import Path

import pytest

from router.model import vocab_size


def test_the_vocabulary_is_what_config_json_says(tmp_path: Path) -> None:
    assert vocab_size(tmp_path) is None
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert vocab_size(tmp_path) is None
    (tmp_path / "config.json").write_text('{"vocab_size": 258, "hidden_size": 8}')
    assert vocab_size(tmp_path) == 258


@pytest.mark.parametrize("text", ["", "{", '{"vocab_size": 0}', '{"vocab_size": "many"}'])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        vocab_size(tmp_path)
