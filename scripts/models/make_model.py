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
SHAPES: dict[str, Config] = json.loads(Path(__file__).with_name("shapes.json").read_text())
# Public models' shapes; the weights are ours.
LIKE: dict[str, Config] = SHAPES["like"]
TINY: Config = SHAPES["tiny"]
# A tiny model of a family needs these besides, to have a bit of all that the family has.
TINY_OF: dict[str, Config] = SHAPES["tiny_of"]
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
