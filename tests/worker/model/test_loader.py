"""Checkpoints fill every tensor and hold no other, or the error names file and tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from scripts.models.make_model import ARCHITECTURES, make_model
from wire.process import log_limit
from wire.process.model import INDEX, SINGLE, ModelError, checkpoint_files
from worker.model.loader import load_weights
from worker.model.mxfp4 import widen_into
from worker.model.shard import WHOLE, Shard
from worker.model.weights import Attention, Tensors, Weights

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


@pytest.mark.parametrize("family", list(ARCHITECTURES))
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_lands_in_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, shards: int
) -> None:
    is_reordered = family == "qwen3_next"  # and `test_transformer` sees how
    if is_reordered:
        monkeypatch.setattr(Weights, "finish_loading", lambda self: None)
    path = make_model(tmp_path, family=family, shards=shards)
    held: dict[str, torch.Tensor] = {}
    for file in checkpoint_files(path):
        held |= load_file(file)
    model = load_weights(path, None, CPU)
    named = model.named_tensors()
    assert named.keys() == held.keys()
    for name, tensor in named.items():
        is_shifted = name.endswith("norm.weight") and not is_reordered
        shift = model.config.norm_shift if is_shifted else 0
        want = held[name] + shift
        if "gate_up_proj" in name:  # of all experts: gate and up alternate there
            want = torch.cat((want[..., ::2], want[..., 1::2]), dim=-1)
        assert torch.equal(tensor, want), name
    last, projections = len(model.layers) - 1, ("q_proj", "k_proj", "v_proj")
    layer = model.layers[last]
    rows = [held[f"model.layers.{last}.self_attn.{name}.weight"] for name in projections]
    assert isinstance(layer.attention, Attention)
    assert torch.equal(layer.attention.qkv.weight, torch.cat(rows))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_progress_counts_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(log_limit, "PROGRESS_S", 0.0)
    with capture_logs() as logs:
        model = load_weights(make_model(tmp_path, family=family, shards=3), None, CPU)
    of = len(model.named_tensors())
    assert {each["event"] for each in logs} == {"loading weights"}
    done = [each["done"] for each in logs]
    assert done == sorted(done) and set(done) == {*range(of)}
    assert {each["of"] for each in logs} == {of}


def packed_experts(path: Path, shards: int) -> tuple[Tensors, Tensors]:
    """Make a gpt-oss whose experts are MXFP4; return what its checkpoint holds, and widened."""
    make_model(path, family="gpt_oss", dtype="bfloat16")
    held = load_file(path / SINGLE)
    generator, widened = torch.Generator().manual_seed(5), dict(held)
    for name in [name for name in held if name.endswith("_proj")]:
        num_experts, columns, rows = held.pop(name).shape
        shape = (num_experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(118, 124, shape, generator=generator).to(torch.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        matrices = torch.empty(num_experts, rows, columns)
        widen_into(matrices, blocks, scales)
        widened[name] = matrices.transpose(1, 2).contiguous()
    (path / SINGLE).unlink()
    # Scales come before blocks, and lie in another file.
    parts = [{name: held[name] for name in sorted(held)[::-1][at::shards]} for at in range(shards)]
    names = [f"model-{at}.safetensors" if shards > 1 else SINGLE for at in range(shards)]
    for part, name in zip(parts, names, strict=True):
        save_file(part, path / name)
    if shards > 1:
        places = {it: name for part, name in zip(parts, names, strict=True) for it in part}
        (path / INDEX).write_text(json.dumps({"weight_map": places}))
    config = json.loads((path / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "mxfp4"},
        "dtype": None,
    }
    (path / "config.json").write_text(json.dumps(config))
    return held, widened


# Half of an expert of 96 are one and a half blocks.
@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2), Shard(1, 2), Shard(3, 4), Shard(1, 2, 1, 2)])
@pytest.mark.parametrize("shards", [1, 3])
def test_mxfp4_is_widened_wherever_its_halves_lie(
    tmp_path: Path, shards: int, shard: Shard
) -> None:
    _, widened = packed_experts(tmp_path, shards)
    packed = load_weights(tmp_path, None, CPU, shard=shard)
    plain = tmp_path / "plain"
    make_model(plain, family="gpt_oss", dtype="bfloat16")
    save_file(widened, plain / SINGLE)
    want = load_weights(plain, None, CPU, shard=shard).named_tensors()
    assert packed.weight_dtype is torch.bfloat16
    for name, tensor in packed.named_tensors().items():
        assert torch.equal(tensor, want[name]), name


def test_mxfp4_of_one_half_or_of_another_shape_is_named(tmp_path: Path) -> None:
    held, _ = packed_experts(tmp_path, 1)
    name = "model.layers.1.mlp.experts.down_proj"
    scales = held.pop(f"{name}_scales")
    save_file(held, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=rf"lacks {name}$"):
        load_weights(tmp_path, None, CPU)
    save_file(held | {f"{name}_scales": scales[:, :-1].contiguous()}, tmp_path / SINGLE)
    with pytest.raises(
        ModelError, match=rf"{name}: _scales are .*\[6, 63, 3\], not .*\[6, 64, 3\]"
    ):
        load_weights(tmp_path, None, CPU)


def test_norms_of_heads_are_repeated(tmp_path: Path) -> None:
    model = load_weights(make_model(tmp_path, family="qwen3", head_dim=16), None, CPU)
    attention = model.layers[0].attention
    assert isinstance(attention, Attention)
    norm = attention.qk_norm
    assert norm is not None and norm.shape == (6, 16)
    assert torch.equal(norm[:4], norm[0].expand(4, -1))
    assert torch.equal(norm[4:], norm[4].expand(2, -1))
    assert not torch.equal(norm[0], norm[4])


@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_converts_to_the_dtype_or_keeps_the_checkpoints(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    path = make_model(tmp_path, dtype="bfloat16")
    model, kept = load_weights(path, dtype, CPU), dtype or torch.bfloat16
    for name, tensor in model.named_tensors().items():
        assert tensor.dtype == (torch.float32 if name.endswith("norm.weight") else kept)
    assert torch.equal(model.embed, load_file(path / SINGLE)["model.embed_tokens.weight"].to(kept))


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


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("is_tied", [False, True])
def test_of_a_multimodal_checkpoint_the_text_part_is_read(
    tmp_path: Path, prefix: str, is_tied: bool
) -> None:
    path = make_model(tmp_path, family="gemma3_text", tie_word_embeddings=is_tied)
    plain = load_weights(path, None, CPU)
    text = json.loads((path / "config.json").read_text())
    whole = {"model_type": "gemma3", "dtype": text.pop("dtype"), "text_config": text}
    (path / "config.json").write_text(json.dumps(whole | {"vision_config": {"hidden_size": 8}}))
    held = load_file(path / SINGLE)
    head = "lm_head." if prefix.startswith("model") else "language_model.lm_head."
    named = {
        name.replace("model.", prefix, 1).replace("lm_head.", head): tensor
        for name, tensor in held.items()
    }
    pictures = {
        f"{prefix.removesuffix('language_model.')}{part}.weight": torch.ones(3)
        for part in ("vision_tower.post_layernorm", "multi_modal_projector.mm_soft_emb_norm")
    }
    if prefix.startswith("language"):
        pictures = {name.removeprefix(prefix): tensor for name, tensor in pictures.items()}
    save_file(named | pictures, path / SINGLE)
    found = load_weights(path, None, CPU).named_tensors()
    assert found.keys() == plain.named_tensors().keys()
    assert all(torch.equal(found[name], it) for name, it in plain.named_tensors().items())


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model__layers__0__self_attn__rotary_emb__inv_freq"),
        ("qwen3_next", "mtp__layers__0__mlp__down_proj__weight"),
    ],
)
def test_rotary_buffers_and_layers_that_predict_further_tokens_are_ignored(
    family: str, name: str, tmp_path: Path
) -> None:
    path = make_model(tmp_path, family=family)
    change(path, **{name: torch.ones(8)})
    load_weights(path, None, CPU)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (Q_PROJ, None, f"lacks {Q_PROJ}$"),
        ("model.layers.0.x.bias", torch.ones(64), r"safetensors: unknown .*layers\.0\.x\.bias"),
        ("model.norm.weight", torch.ones(63), r"model\.norm\.weight is \(63,\).*\(64,\)"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int8), r"norm\.weight is torch\.int8"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_of_another_kind_is_named(
    name: str, tensor: torch.Tensor | None, words: str, tmp_path: Path
) -> None:
    path = make_model(tmp_path)
    change(path, **{name.replace(".", "__"): tensor})
    with pytest.raises(ModelError, match=words):
        load_weights(path, None, CPU)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, path / SINGLE)
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight, .* and 15 more"):
        load_weights(path, None, CPU)


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    (path / SINGLE).write_bytes(b"not safetensors at all")
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        load_weights(path, None, CPU)
    (path / SINGLE).unlink()
    with pytest.raises(ModelError, match=SINGLE):
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
