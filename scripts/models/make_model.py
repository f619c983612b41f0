"""Write a random checkpoint in the Hugging Face format: for tests and benchmarks, no download.

    python -m scripts.models.make_model --family qwen3 --heads 8 --kv-heads 2 --out /tmp/tiny
    python -m scripts.models.make_model --like smollm2-135m --out /tmp/smollm2 --tokenizer wire/demo

Needs torch and safetensors only; transformers loads what it writes.  The same seed and shape give
the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Public models' shapes, weights ours.
LIKE: dict[str, Config] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "mistral-7b": {
        "model_type": "mistral",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}
TINY: Config = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def make_model(
    out: Path,
    *,
    family: str = "llama",
    like: str | None = None,
    seed: int = 0,
    shards: int = 1,
    tokenizer: Path | None = None,
    **config: Any,
) -> Path:
    """Write a random model directory and return it.

    Args:
        family: model_type of config.json; ignored with `like`.
        like: A name of `LIKE`, whose shape is the start instead of a tiny one.
        shards: Number of safetensors files; more than one come with an index.
        tokenizer: A directory whose tokenizer files are copied.
        config: Keys of config.json, over all else; None values are written as null.
    """
    start = LIKE[like] if like else {"model_type": family}
    whole: Config = {**TINY, **start, **config}
    if whole["model_type"] == "mistral":
        whole.setdefault("sliding_window", None)
    whole["architectures"] = [ARCHITECTURES[whole["model_type"]]]
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    tensors = _random_tensors(whole, seed)
    _save(out, tensors, shards)
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, out / name)
    return out


def _random_tensors(config: Config, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    tensors: Tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor = 1.0 + 0.1 * noise
        elif name.endswith(".bias"):
            tensor = 0.1 * noise
        elif name == "model.embed_tokens.weight":
            tensor = noise if not config["tie_word_embeddings"] else noise * shape[1] ** -0.5 * 4
        else:
            # Sharper than training starts with: greedy tokens must not hang on the last bit.
            tensor = noise * shape[1] ** -0.5 * 1.5
        tensors[name] = tensor.to(dtype)
    return tensors


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor the checkpoint of a config.json holds."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    family = config["model_type"]
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden // num_heads)
    query, kv = num_heads * head_dim, num_kv_heads * head_dim
    attention_bias = bool(config.get("attention_bias"))
    biased = {"q_proj", "k_proj", "v_proj"} if family == "qwen2" or attention_bias else set()
    biased |= {"o_proj"} if attention_bias else set()
    biased |= {"gate_proj", "up_proj", "down_proj"} if config.get("mlp_bias") else set()
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if name.split(".")[1] in biased:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if family == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _save(out: Path, tensors: Tensors, shards: int) -> None:
    # transformers wants to know which framework's tensors these are.
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, out / "model.safetensors", metadata)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = names[index::shards]
        save_file({name: tensors[name] for name in part}, out / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index_json, indent=2) + "\n"
    (out / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a flag left out keeps the value of --like or of a tiny model."""
    parser = argparse.ArgumentParser(description="Write a random checkpoint.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument("--like", choices=sorted(LIKE))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, metavar="DIR")
    for flag, key in (
        ("--layers", "num_hidden_layers"),
        ("--hidden", "hidden_size"),
        ("--intermediate", "intermediate_size"),
        ("--heads", "num_attention_heads"),
        ("--kv-heads", "num_key_value_heads"),
        ("--head-dim", "head_dim"),
        ("--vocab-size", "vocab_size"),
        ("--max-positions", "max_position_embeddings"),
        ("--window", "sliding_window"),
    ):
        parser.add_argument(flag, type=int, dest=key, default=argparse.SUPPRESS)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--tied", action="store_true", dest="tie_word_embeddings", default=argparse.SUPPRESS
    )
    return parser.parse_args(argv)


def main() -> None:
    """Write the model the command line describes."""
    print(make_model(**vars(parse_args())))


if __name__ == "__main__":
    main()
