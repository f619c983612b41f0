"""Checkpoints fill every tensor and hold no other, or the error names file and tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.models.make_model import make_model
from wire.process.model import INDEX, SINGLE, ModelError, checkpoint_files
from worker.model.loader import load_weights
from worker.model.weights import Weights

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors; dots of names are written as double underscores."""
    held = load_file(path / SINGLE)
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, path / SINGLE)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_lands_in_its_rows(tmp_path: Path, family: str, shards: int) -> None:
    path = make_model(tmp_path, family=family, shards=shards)
    held: dict[str, torch.Tensor] = {}
    for file in checkpoint_files(path):
        held |= load_file(file)
    model = load_weights(path, None, CPU)
    named = model.named_tensors()
    assert named.keys() == held.keys()
    for name, tensor in named.items():
        assert torch.equal(tensor, held[name]), name
    layer, projections = model.layers[1], ("q_proj", "k_proj", "v_proj")
    rows = [held[f"model.layers.1.self_attn.{name}.weight"] for name in projections]
    assert torch.equal(layer.qkv.weight, torch.cat(rows))


def test_norms_of_heads_are_repeated(tmp_path: Path) -> None:
    model = load_weights(make_model(tmp_path, family="qwen3", head_dim=16), None, CPU)
    norm = model.layers[0].qk_norm
    assert norm is not None and norm.shape == (6, 16)
    assert torch.equal(norm[:4], norm[0].expand(4, -1))
    assert torch.equal(norm[4:], norm[4].expand(2, -1))
    assert not torch.equal(norm[0], norm[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_converts_to_the_dtype_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    path = make_model(tmp_path, dtype="bfloat16")
    model = load_weights(path, dtype, CPU)
    assert {tensor.dtype for tensor in model.named_tensors().values()} == {dtype}
    assert torch.equal(model.embed, load_file(path / SINGLE)["model.embed_tokens.weight"].to(dtype))


def test_without_a_dtype_the_checkpoints_own_is_kept(tmp_path: Path) -> None:
    assert (
        load_weights(make_model(tmp_path, dtype="bfloat16"), None, CPU).weight_dtype
        == torch.bfloat16
    )


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    path = make_model(tmp_path, tie_word_embeddings=True)
    assert_tied(load_weights(path, None, CPU))
    # Some checkpoints store the output matrix all the same.
    change(path, lm_head__weight=torch.zeros(256, 64))
    model = load_weights(path, torch.bfloat16, CPU)
    assert_tied(model)
    model.widen()
    assert_tied(model)


def assert_tied(model: Weights) -> None:
    assert model.head is model.embed and bool(model.embed.any())


def test_stored_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    change(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load_weights(path, None, CPU)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    change(path, **{Q_PROJ.replace(".", "__"): None})
    with pytest.raises(ModelError, match=f"lacks {Q_PROJ}"):
        load_weights(path, None, CPU)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, path / SINGLE)
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight, .* and 15 more"):
        load_weights(path, None, CPU)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    change(path, model__layers__0__self_attn__q_proj__bias=torch.ones(64))
    with pytest.raises(ModelError, match=r"unknown .*layers\.0\.self_attn\.q_proj\.bias"):
        load_weights(path, None, CPU)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    change(path, model__norm__weight=torch.ones(63))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \(63,\).*\(64,\)"):
        load_weights(path, None, CPU)


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    change(path, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.int8"):
        load_weights(path, None, CPU)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    (path / SINGLE).unlink()
    with pytest.raises(ModelError, match=SINGLE):
        load_weights(path, None, CPU)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    (path / SINGLE).write_bytes(b"not safetensors at all")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_weights(path, None, CPU)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    path = make_model(tmp_path, shards=2)
    (path / INDEX).write_text(text)
    with pytest.raises(ModelError, match="index"):
        load_weights(path, None, CPU)


@pytest.mark.parametrize("name", ["gone.safetensors", "../model-00001-of-00002.safetensors", "/x"])
def test_an_index_names_only_files_beside_it(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path, shards=2)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not beside it"):
        load_weights(path, None, CPU)
