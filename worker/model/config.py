"""What a Hugging Face directory says about its model, as data the transformer needs.

The families differ in a few switches (biases, a norm on query and key, which layers see a window):
each is a field of `ModelConfig`, so the transformer never asks which family it runs.  Anything this
module does not know how to honour is refused with an error that names the key, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from wire.process.model import ModelError as ModelError
from wire.process.model import check_family, read_json
from worker.model.rope import Rope, read_rope

DTYPES: Final = ("float32", "bfloat16", "float16")


class Family(NamedTuple):
    """What a `model_type` implies where config.json is silent."""

    num_kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size / num_attention_heads
    max_positions: int
    attention_bias: bool | None  # None: the key attention_bias decides, for q, k, v and o
    qk_norm: bool = False
    windowed: bool = False  # has sliding_window for every layer
    window_layers: bool = False  # has use_sliding_window, max_window_layers, layer_types


FAMILIES: Final = {
    "llama": Family(None, None, 2048, None),
    "mistral": Family(8, None, 131_072, False, windowed=True),
    "qwen2": Family(32, None, 32_768, True, window_layers=True),
    "qwen3": Family(32, 128, 32_768, None, qk_norm=True, window_layers=True),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model's shape.

    `windows` holds, for each layer, how many positions a query sees (its own included), or None.
    `dtype` is the checkpoint's; `eos_token_ids` any of which ends a text.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: str
    eos_token_ids: frozenset[int]


def read_config(path: Path) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` where there is one, of a model directory.

    Raises:
        ModelError: A file is missing or no JSON object, a key is missing, of the wrong type, out of
            range, or asks for something this transformer does not do.
    """
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    eos = _eos_token_ids(read_json(generation), generation) if generation.is_file() else None
    if eos is None:
        eos = _eos_token_ids(config, path / "config.json") or frozenset()
    try:
        return _parse(config, eos)
    except ModelError as error:
        raise ModelError(f"{path / 'config.json'}: {error}") from error


def _parse(config: Mapping[str, Any], eos_token_ids: frozenset[int]) -> ModelConfig:
    name = check_family(config.get("model_type"))
    family = FAMILIES[name]
    _refuse_unknown(config)
    hidden_size = _count(config, "hidden_size")
    num_heads = _count(config, "num_attention_heads")
    num_layers = _count(config, "num_hidden_layers")
    num_kv_heads = _num_kv_heads(config, family, num_heads)
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    max_positions = _count(config, "max_position_embeddings", family.max_positions)
    bias, o_bias = family.attention_bias, False
    if bias is None:
        bias = o_bias = _flag(config, "attention_bias")
    try:
        rope = read_rope(config, head_dim, max_positions)
    except ValueError as error:
        raise ModelError(str(error)) from error
    return ModelConfig(
        family=name,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=_norm_eps(config),
        max_positions=max_positions,
        rope=rope,
        windows=_windows(config, family, num_layers),
        qkv_bias=bias,
        o_bias=o_bias,
        mlp_bias=_flag(config, "mlp_bias") if name == "llama" else False,
        qk_norm=family.qk_norm,
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        dtype=_dtype(config),
        eos_token_ids=eos_token_ids,
    )


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        raise ModelError("quantization_config: quantized checkpoints are not supported")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act is {activation!r}, only 'silu' is supported")


def _num_kv_heads(config: Mapping[str, Any], family: Family, num_heads: int) -> int:
    default = family.num_kv_heads or num_heads
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        default = num_heads
    num_kv_heads = _count(config, "num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_key_value_heads is {num_kv_heads}, no divisor of the {num_heads} attention heads"
        )
    return num_kv_heads


def _head_dim(config: Mapping[str, Any], family: Family, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise ModelError(
            f"hidden_size is {hidden_size}, no multiple of num_attention_heads = {num_heads}, "
            "and there is no head_dim"
        )
    head_dim = _count(config, "head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}; rotary embeddings need an even one")
    return head_dim


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.windowed:
        return (_window(config),) * num_layers
    if not family.window_layers:
        return (None,) * num_layers
    window = _window(config) if _flag(config, "use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = _count(config, "max_window_layers", 28, minimum=0)
        return (None,) * min(first, num_layers) + (window,) * max(num_layers - first, 0)
    by_kind: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(by_kind):
        raise ModelError(
            f"layer_types must name full_attention or sliding_attention for {num_layers} layers"
        )
    if window is None and "sliding_attention" in kinds:
        raise ModelError("layer_types has sliding_attention but use_sliding_window is off")
    return tuple(by_kind[kind] for kind in kinds)


def _window(config: Mapping[str, Any]) -> int | None:
    # A missing key means the families' default, an explicit null means no window.
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return _count(config, "sliding_window", 4096)


def _eos_token_ids(config: Mapping[str, Any], path: Path) -> frozenset[int] | None:
    value = config.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelError(f"{path}: eos_token_id is {value!r}, not a token id or a list of them")
    return frozenset(ids)


def _dtype(config: Mapping[str, Any]) -> str:
    # transformers 5 writes dtype, earlier releases torch_dtype.
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    if value not in DTYPES:
        raise ModelError(f"dtype is {value!r}, not one of {', '.join(DTYPES)}")
    return str(value)


def _norm_eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise ModelError(f"rms_norm_eps is {value!r}, not a small positive number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}, not true or false")
    return value


def _count(
    config: Mapping[str, Any],
    key: str,
    default: int | None = None,
    *,
    minimum: int = 1,
) -> int:
    """Return an integer of at least `minimum`; a null stands for the default."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{key} is missing")
    if type(value) is not int or value < minimum:
        raise ModelError(f"{key} is {value!r}, not an integer of at least {minimum}")
    return value
