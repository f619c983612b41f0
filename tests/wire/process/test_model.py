"""Model directories are found, fingerprinted and checked for missing or truncated files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from wire.errors import ErrorCode, WireError
from wire.process.model import (
    DEMO,
    FAMILIES,
    INDEX,
    SINGLE,
    ModelError,
    check_files,
    check_weights,
    fingerprint,
    locate,
    vocab_size,
)

Damage = Callable[[bytes], bytes]
FORBIDDEN: Any = httpx.Response(403, request=httpx.Request("GET", "http://hub"))
KNOWN = f"not one of {', '.join(FAMILIES)}"


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

    def snapshot_download(name: str, allow_patterns: list[str], **_: object) -> str:
        asked.append((name, allow_patterns))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("org/name") == model
    assert asked[0][0] == "org/name" and "*.safetensors" in asked[0][1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("", response=FORBIDDEN), "accept the model's terms"),
        (RepositoryNotFoundError("", response=FORBIDDEN), "no such model, or it is private"),
        (LocalEntryNotFoundError(""), "the hub cannot be reached"),
        (HFValidationError(""), "not a valid name"),
        (ConnectionError("offline"), "failed: ConnectionError"),
    ],
)
def test_a_name_that_the_hub_refuses_is_not_found(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(name: str, allow_patterns: list[str], **_: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(WireError, match=words) as caught:
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


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def replaced(new: bytes) -> Damage:
    return lambda content: new


def indexed(weight_map: object) -> Damage:
    return replaced(json.dumps({"weight_map": weight_map}).encode())


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        *[
            (name, damage, f"{name}: .* is the file whole")
            for name in ("config.json", "generation_config.json", "tokenizer.json")
            for damage in (half, replaced(b""), replaced(b"{"))
        ],
        *[
            ("config.json", replaced(content), r"config\.json")
            for content in (b"[]", b"null", b"\xff\xfe", b"[" * 100_000)
        ],
        ("config.json", None, "not a Hugging Face model directory"),
        *[
            ("config.json", replaced(json.dumps({"model_type": family}).encode()), KNOWN)
            for family in ("gpt2", "", None, 3, "x" * 1000, "two\nlines")
        ],
        *[
            (SINGLE, damage, "safetensors.* is the file whole")
            for damage in (half, replaced(b""), replaced(bytes(7)), lambda c: c + b"x")
        ],
        (SINGLE, None, f"neither {SINGLE} nor {INDEX}"),
        (INDEX, indexed({"a": "one.safetensors"}), r"not beside it: one\.safetensors"),
        (INDEX, indexed({"a": f"../model/{SINGLE}"}), "not beside it"),
        *[(INDEX, replaced(content), "index") for content in (b"{}", b"[]", b"{")],
        (INDEX, indexed([]), "index"),
    ],
)
def test_a_damaged_directory_is_refused_in_one_line(
    tmp_path: Path, name: str, damage: Damage | None, reason: str
) -> None:
    model = Path(shutil.copytree(DEMO, tmp_path / "model"))
    check_files(model)
    check_weights(model)
    file = model / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes() if file.exists() else b""))
    with pytest.raises(ModelError, match=reason) as caught:
        check_files(model)
        check_weights(model)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_only_config_json_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_files(tmp_path)


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
