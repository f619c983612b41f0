"""Parses the config.json of a Hugging Face model directory.

Differences between model families (`worker.model.families`) become fields of `ModelConfig`, and
differences between layers fields of `LayerConfig`, so the transformer never checks the family.  A
key whose value is not supported raises an error that names the key; it is never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kernels import GELU_TANH, SILU, Activation
from wire.process.model import ModelError as ModelError
from wire.process.model import check_family, read_json, text_keys
from worker.model.families import FAMILIES, DeltaHeads, Experts, Family
from worker.model.keys import Keys, count, flag, positive
from worker.model.rope import Rope

DTYPES: Final = ("float32", "bfloat16", "float16")
ACTIVATIONS: Final = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
# Keys that would change the computation but are not supported, unless they are null or false.
REFUSED: Final = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The configuration of one layer, where it can differ from other layers of the model.

    Attributes:
        window: The size of the sliding window, including the query's own position, or None.
        rope: The rotary embedding of queries and keys.
        experts: The mixture of experts; None for a dense feed-forward.
        delta: The heads of a gated delta net; None if the layer has softmax attention.
    """

    window: int | None
    rope: Rope
    experts: Experts | None
    delta: DeltaHeads | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a model.

    Attributes:
        intermediate_size: The inner size of dense feed-forwards.
        attention_scale: The factor that multiplies query-key products before the softmax.
        norm_shift: A number that is added to the stored weights of norms.
        has_sinks: Whether each head has an attention sink: a learned score in the softmax that
            contributes no value.
        has_output_gate: Whether attention outputs are gated; q_proj then also computes the gates.
        post_norms: Whether the outputs of attention and feed-forward are normalized.
        is_multimodal: Whether the checkpoint has parts other than text, which are not loaded.
        dtype: The dtype of the checkpoint.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    norm_eps: float
    norm_shift: float
    has_sinks: bool
    has_output_gate: bool
    post_norms: bool
    activation: Activation
    embedding_scale: float
    max_positions: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    is_multimodal: bool
    dtype: str
    eos_token_ids: frozenset[int]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def intermediate_sizes(self) -> frozenset[int]:
        """The inner sizes of feed-forwards and experts that occur in the model."""
        return frozenset(map(self.intermediate_size_of, self.layers))

    def intermediate_size_of(self, layer: LayerConfig) -> int:
        """Return the inner size of a layer's dense feed-forward, or of each of its experts."""
        own = layer.experts
        return self.intermediate_size if own is None else own.intermediate_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window, or None, of each layer that has softmax attention."""
        return tuple(layer.window for layer in self.layers if layer.delta is None)

    @property
    def delta_layers(self) -> tuple[DeltaHeads, ...]:
        """The heads of each layer that has a recurrent state."""
        return tuple(layer.delta for layer in self.layers if layer.delta is not None)


def read_config(path: Path) -> ModelConfig:
    """Parse the `config.json` and, if it exists, `generation_config.json` of a model directory.

    Raises:
        ModelError: `config.json` is missing, a file is no JSON object, or a key is missing, has the
            wrong type, is out of range, or requires a feature that is not supported.
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


def _parse(config: Keys, eos_token_ids: frozenset[int]) -> ModelConfig:
    check_family(config.get("model_type"))
    is_multimodal, config = "text_config" in config, text_keys(config)
    name = check_family(config["model_type"])
    family = FAMILIES[name]
    _refuse_unknown(config)
    hidden_size = count(config, "hidden_size")
    num_heads = count(config, "num_attention_heads", family.num_heads)
    num_kv_heads = _num_kv_heads(config, family, num_heads)
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    max_positions = count(config, "max_position_embeddings", family.max_positions)
    bias, o_bias = family.attention_bias, False
    if bias is None:
        bias = o_bias = flag(config, "attention_bias", default=family.is_biased)
    ropes = family.ropes(config, head_dim, max_positions)
    query_scalar = float(head_dim)
    if family.query_scalar is not None:
        query_scalar = positive(config, "query_pre_attn_scalar", family.query_scalar)
    num_layers = count(config, "num_hidden_layers")
    windows, experts = family.windows(config, num_layers), family.experts(config, num_layers)
    delta = family.delta(config, num_layers)
    if None not in delta:
        raise ModelError("layer_types has no layer with attention; one at least is needed")
    layers = (
        LayerConfig(window, ropes.everywhere if window is None else ropes.windowed, own, heads)
        for window, own, heads in zip(windows, experts, delta, strict=True)
    )
    return ModelConfig(
        family=name,
        vocab_size=count(config, "vocab_size", family.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=count(config, "intermediate_size"),
        layers=tuple(layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_scale=query_scalar**-0.5,
        norm_eps=_norm_eps(config),
        norm_shift=family.norm_shift,
        has_sinks=family.has_sinks,
        has_output_gate=family.has_output_gate,
        post_norms=family.post_norms,
        activation=_activation(config, family),
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        max_positions=max_positions,
        qkv_bias=bias,
        o_bias=o_bias,
        mlp_bias=family.has_mlp_bias and flag(config, "mlp_bias"),
        qk_norm=family.qk_norm,
        tied_embeddings=flag(config, "tie_word_embeddings", default=family.tied_embeddings),
        is_multimodal=is_multimodal,
        dtype=_dtype(config),
        eos_token_ids=eos_token_ids,
    )


def _refuse_unknown(config: Keys) -> None:
    if config.get("quantization_config") and not _is_mxfp4(config):
        raise ModelError("quantization_config: only mxfp4 is supported, which is widened")
    for key in REFUSED:
        if config.get(key):
            raise ModelError(f"{key} is {config[key]!r}, which is not supported; it must be null")


def _is_mxfp4(config: Keys) -> bool:
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def _activation(config: Keys, family: Family) -> Activation:
    if family.is_clamped:
        steep = positive(config, "swiglu_alpha", 1.702)
        limit = positive(config, "swiglu_limit", 7.0)
        return Activation(steep, 0.0, limit=limit, shift=1.0)
    name = config.get(family.activation_key, family.activation)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        allowed = ", ".join(ACTIVATIONS)
        raise ModelError(f"{family.activation_key} is {name!r}, not one of {allowed}")
    return ACTIVATIONS[name]


def _num_kv_heads(config: Keys, family: Family, num_heads: int) -> int:
    default = family.num_kv_heads or num_heads
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        default = num_heads
    num_kv_heads = count(config, "num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_key_value_heads is {num_kv_heads}, no divisor of the {num_heads} attention heads"
        )
    return num_kv_heads


def _head_dim(config: Keys, family: Family, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise ModelError(
            f"hidden_size is {hidden_size}, no multiple of num_attention_heads = {num_heads}, "
            "and there is no head_dim"
        )
    head_dim = count(config, "head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}; rotary embeddings need an even one")
    return head_dim


def _eos_token_ids(config: Keys, path: Path) -> frozenset[int] | None:
    value = config.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelError(f"{path}: eos_token_id is {value!r}, not a token id or a list of them")
    return frozenset(ids)


def _dtype(config: Keys) -> str:
    # transformers 5 writes "dtype", earlier releases "torch_dtype".
    silent = "bfloat16" if _is_mxfp4(config) else "float32"
    value = config.get("dtype") or config.get("torch_dtype") or silent
    if value not in DTYPES:
        raise ModelError(f"dtype is {value!r}, not one of {', '.join(DTYPES)}")
    return str(value)


def _norm_eps(config: Keys) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise ModelError(f"rms_norm_eps is {value!r}, not a small positive number")
    return float(value)
