"""Where a model lies and which one it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from wire.errors import ErrorCode, WireError
from wire.model import DEMO, fingerprint, locate


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


def test_demo_is_the_one_inside_the_package() -> None:
    assert DEMO.parent.name == "wire"
    if (DEMO / "config.json").is_file():
        assert locate("demo") == DEMO
    else:
        with pytest.raises(WireError, match=r"no config\.json"):
            locate("demo")


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


def test_what_the_hub_refuses_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(WireError, match="the hub said: ConnectionError") as caught:
        locate("org/name")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND


def test_the_hub_is_not_imported_for_a_directory(model: Path) -> None:
    code = f"""
import sys
from wire.model import fingerprint, locate
fingerprint(locate({str(model)!r}))
assert "huggingface_hub" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_fingerprint_is_16_hex_digits_and_of_the_content(model: Path) -> None:
    before = fingerprint(model)
    assert len(before) == 16 and int(before, 16) >= 0
    (model / "README.md").write_text("not part of it")
    assert fingerprint(model) == before


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
