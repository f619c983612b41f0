"""A model directory that is not whole is refused in one sentence, before anybody loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from wire.checkpoint import (
    FAMILIES,
    INDEX,
    SINGLE,
    ModelError,
    check_files,
    check_weights,
    checkpoint_files,
)
from wire.model import DEMO


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def cut(file: Path, size: int | None = None) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 if size is None else size])


def test_the_demo_is_whole(model: Path) -> None:
    check_files(model)
    check_weights(model)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("size", [0, 1, None])
def test_a_file_that_is_cut_off_is_named(model: Path, name: str, size: int | None) -> None:
    cut(model / name, size)
    with pytest.raises(ModelError, match=f"{name}: .* is the file whole") as caught:
        check_files(model)
    assert "\n" not in str(caught.value)


def test_json_of_another_kind_or_no_text_is_no_config(model: Path) -> None:
    for content in (b"[]", b"null", b"\xff\xfe", b"[" * 100_000):
        (model / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"config\.json"):
            check_files(model)
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match="not a Hugging Face model directory"):
        check_files(model)


def test_only_config_json_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_files(tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "", None, 3, "x" * 1000, "two\nlines"])
def test_another_family_is_refused_with_those_there_are(model: Path, family: object) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ModelError, match=f"not one of {', '.join(FAMILIES)}") as caught:
        check_weights(model)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 8, 1000, -1])
def test_weights_that_are_cut_off_are_named(model: Path, size: int) -> None:
    cut(model / SINGLE, size)
    with pytest.raises(ModelError, match=r"safetensors.* is the file whole"):
        check_weights(model)


def test_bytes_behind_the_weights_are_noticed(model: Path) -> None:
    with (model / SINGLE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="its header says"):
        check_weights(model)


@pytest.mark.parametrize("header", [b"[]", b"{}}", b'{"a":1}', b'{"a":{"data_offsets":["x"]}}'])
def test_a_header_that_is_none_is_refused(model: Path, header: bytes) -> None:
    (model / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="no safetensors header"):
        check_weights(model)


def test_weights_are_beside_their_index(model: Path) -> None:
    (model / SINGLE).rename(model.parent / SINGLE)
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": f"../{SINGLE}"}}))
    with pytest.raises(ModelError, match="not beside it"):
        check_weights(model)


def test_missing_weights_are_named(model: Path) -> None:
    (model / SINGLE).unlink()
    with pytest.raises(ModelError, match=f"neither {SINGLE} nor {INDEX}"):
        check_weights(model)
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ModelError, match=r"not beside it: one\.safetensors"):
        checkpoint_files(model)
    for text in ("{}", "[]", '{"weight_map": []}', "{"):
        (model / INDEX).write_text(text)
        with pytest.raises(ModelError, match="index"):
            check_weights(model)
