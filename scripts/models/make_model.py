"""Write a random checkpoint in the Hugging Face format: for tests and benchmarks, no download.

    python -m scripts.models.make_model --family qwen3 --heads 8 --kv-heads 2 --out /tmp/tiny
    python -m scripts.models.make_model --like smollm2-135m --out /tmp/smollm2 --tokenizer wire/demo

Which tensors there are is what `worker.model` asks a checkpoint for; transformers loads what is
written.  The same seed and shape give the same bytes.
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

from worker.model.config import read_config
from worker.model.weights import Weights

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
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
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262_144,
        "rope_theta": 10_000_000,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
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
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
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
# What a tiny model of a family needs besides, to have a bit of all that the family has.
TINY_OF: dict[str, Config] = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "sliding_window": 12,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
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
    start = LIKE[like] if like else {"model_type": family, **TINY_OF.get(family, {})}
    whole: Config = {**TINY, **start, **config}
    whole["architectures"] = [ARCHITECTURES[whole["model_type"]]]
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    tensors = _random_tensors(out, whole, seed)
    _save(out, tensors, shards)
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, out / name)
    return out


def _random_tensors(out: Path, config: Config, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    tensors: Tensors = {}
    for name, shape in tensor_shapes(out).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor = 1.0 + 0.1 * noise
        elif name.endswith((".A_log", "bias")):
            tensor = 0.1 * noise
        elif name.endswith(".sinks"):
            tensor = noise
        elif name == "model.embed_tokens.weight":
            tensor = noise if not config["tie_word_embeddings"] else noise * shape[1] ** -0.5 * 4
        else:
            # Sharper than training starts with: greedy tokens must not hang on the last bit.
            tensor = noise * shape[1] ** -0.5 * 1.5
        tensors[name] = tensor.to(dtype)
    return tensors


def tensor_shapes(path: Path) -> dict[str, torch.Size]:
    """Return the name and shape of every tensor the checkpoint of a model directory holds."""
    nowhere = Weights(read_config(path), torch.float32, torch.device("meta"))
    return {name: tensor.shape for name, tensor in nowhere.named_tensors().items()}


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
