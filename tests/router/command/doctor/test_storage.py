"""Sizes of the KV cache, free memory, and what is missing of a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from router.command.doctor.storage import (
    check_cache,
    check_memory,
    check_model,
    find_model,
    kv_token_bytes,
)
from wire.process.model import DEMO, read_json


def test_the_kv_of_a_token() -> None:
    demo = read_json(DEMO / "config.json")
    sizes = demo["num_hidden_layers"] * demo["num_key_value_heads"]
    assert kv_token_bytes(demo, 4) == 2 * 4 * sizes * (
        demo.get("head_dim") or demo["hidden_size"] // demo["num_attention_heads"]
    )
    assert kv_token_bytes({"text_config": {**demo, "head_dim": 8}}, 2) == 2 * 2 * sizes * 8
    assert kv_token_bytes({"hidden_size": 8}, 2) is None


def test_blocks_are_compared_with_free_memory() -> None:
    sizes: dict[str, Any] = {"block_size": 16, "kv_cache_bytes": 0, "host_kv_bytes": 0}
    worker = SimpleNamespace(num_blocks=1000, dtype="auto", kv_dtype="float32", **sizes)
    token_bytes = kv_token_bytes(read_json(DEMO / "config.json"), 4)
    assert token_bytes is not None
    weights = sum(file.stat().st_size for file in DEMO.glob("*.safetensors"))
    enough = weights + 16_000 * token_bytes
    assert check_memory([worker], DEMO, enough).level == "ok"
    assert check_memory([worker], DEMO, None).level == "ok"
    found = check_memory([worker, worker], DEMO, enough)
    assert found.level == "fault"
    assert f"--kv-cache-bytes {(enough - 2 * weights) // 2} " in found.cure
    assert "smaller model" in check_memory([worker], DEMO, weights).cure


def test_a_model_without_a_tokenizer_and_one_that_is_not_downloaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = check_model(str(tmp_path), has_weights=False)
    assert [each.level for each in found] == ["warning", "ok"]
    absent = find_model("nobody-has/this-model")
    assert not isinstance(absent, Path) and absent.cure == "hf download nobody-has/this-model"


def test_a_cache_that_cannot_be_written_is_slow(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert check_cache({"XDG_CACHE_HOME": str(tmp_path / "file")}).level == "warning"
    assert check_cache({"XDG_CACHE_HOME": str(tmp_path / "new")}).level == "ok"
