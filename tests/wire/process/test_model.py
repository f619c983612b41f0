"""Model directories are found, fingerprinted and checked for missing or truncated files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from wire.errors import ErrorCode, WireError
from wire.process.model import (
    DEMO,
    FAMILIES,
    INDEX,
    SINGLE,
    ModelError,
    check_files,
    check_weights,
    checkpoint_files,
    fingerprint,
    locate,
    vocab_size,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-00002.safetensors").write_bytes(bytes(20))
    (tmp_path / "model-00001.safetensors").write_bytes(bytes(10))
    return tmp_path


def test_a_directory_is_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(str(model)) == model
    monkeypatch.chdir(model.parent)
    assert locate(f"./{model.name}").resolve() == model.resolve()


@pytest.mark.parametrize("name", ["/no/such/model", "./none", "~/none", "a/b/c"])
def test_a_path_that_is_not_there_is_never_looked_for_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(WireError, match="no such directory") as caught:
        locate(name)
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert name in caught.value.message


def test_a_directory_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(WireError, match=r"has no config\.json"):
        locate(str(tmp_path))


def test_any_other_name_is_the_hubs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("org/name") == model
    assert asked[0][0] == "org/name" and "*.safetensors" in asked[0][1]


def test_a_name_that_the_hub_refuses_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(WireError, match="the hub said: ConnectionError") as caught:
        locate("org/name")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND


def test_the_hub_is_not_imported_for_a_directory(model: Path) -> None:
    code = f"""
import sys
from wire.process.model import fingerprint, locate
fingerprint(locate({str(model)!r}))
assert "huggingface_hub" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{}"),
        ("tokenizer.json", b"[]"),
        ("model-00001.safetensors", bytes(11)),
        ("model-00003.safetensors", b""),
    ],
)
def test_another_file_is_another_fingerprint(model: Path, name: str, content: bytes) -> None:
    before = fingerprint(model)
    (model / name).write_bytes(content)
    assert fingerprint(model) != before


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def cut(file: Path, size: int | None = None) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 if size is None else size])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("size", [0, 1, None])
def test_a_file_that_is_cut_off_is_named(whole: Path, name: str, size: int | None) -> None:
    cut(whole / name, size)
    with pytest.raises(ModelError, match=f"{name}: .* is the file whole") as caught:
        check_files(whole)
    assert "\n" not in str(caught.value)


def test_json_of_another_kind_or_no_text_is_no_config(whole: Path) -> None:
    for content in (b"[]", b"null", b"\xff\xfe", b"[" * 100_000):
        (whole / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"config\.json"):
            check_files(whole)
    (whole / "config.json").unlink()
    with pytest.raises(ModelError, match="not a Hugging Face model directory"):
        check_files(whole)


def test_only_config_json_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_files(tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "", None, 3, "x" * 1000, "two\nlines"])
def test_an_unknown_family_is_refused_with_the_known_ones(whole: Path, family: object) -> None:
    (whole / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ModelError, match=f"not one of {', '.join(FAMILIES)}") as caught:
        check_weights(whole)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 8, 1000, -1])
def test_weights_that_are_cut_off_are_named(whole: Path, size: int) -> None:
    cut(whole / SINGLE, size)
    with pytest.raises(ModelError, match=r"safetensors.* is the file whole"):
        check_weights(whole)


def test_weights_outside_the_directory_are_refused(whole: Path) -> None:
    (whole / SINGLE).rename(whole.parent / SINGLE)
    (whole / INDEX).write_text(json.dumps({"weight_map": {"a": f"../{SINGLE}"}}))
    with pytest.raises(ModelError, match="not beside it"):
        check_weights(whole)


def test_missing_weights_are_named(whole: Path) -> None:
    (whole / SINGLE).unlink()
    with pytest.raises(ModelError, match=f"neither {SINGLE} nor {INDEX}"):
        check_weights(whole)
    (whole / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ModelError, match=r"not beside it: one\.safetensors"):
        checkpoint_files(whole)
    for text in ("{}", "[]", '{"weight_map": []}', "{"):
        (whole / INDEX).write_text(text)
        with pytest.raises(ModelError, match="index"):
            check_weights(whole)


def test_the_vocabulary_is_what_config_json_says(tmp_path: Path) -> None:
    assert vocab_size(tmp_path) is None
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert vocab_size(tmp_path) is None
    (tmp_path / "config.json").write_text('{"vocab_size": 258, "hidden_size": 8}')
    assert vocab_size(tmp_path) == 258
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 260}}')
    assert vocab_size(tmp_path) == 260


@pytest.mark.parametrize(
    "text", ["", "{", '{"vocab_size": 0}', '{"vocab_size": true}', '{"vocab_size": "many"}']
)
def test_a_vocabulary_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        vocab_size(tmp_path)
