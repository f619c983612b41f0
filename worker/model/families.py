"""Model families: the defaults of each `model_type`, and how to parse its config.json.

A family is an entry of `FAMILIES`, and its name is in `FAMILIES` of `wire.process.model`, which
routers check too.  Its functions parse the config keys that differ by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from wire.process.model import ModelError
from worker.model.keys import Keys, count, flag, positive
from worker.model.rope import Rope, read_rope

# The sliding window of each layer, including the query's own position; None: no window.
Windows = tuple[int | None, ...]


class Ropes(NamedTuple):
    """The rotary embeddings of layers that see all positions, and of sliding-window layers."""

    everywhere: Rope
    windowed: Rope


def on_no_layer(_keys: Keys, num_layers: int) -> tuple[None, ...]:
    """Return None for each layer: no layer has a window, experts or a state."""
    return (None,) * num_layers


def same_window(keys: Keys, num_layers: int) -> Windows:
    """Return `sliding_window` for every layer."""
    return (_window(keys),) * num_layers


def same_window_if_used(keys: Keys, num_layers: int) -> Windows:
    """Return `sliding_window` for every layer if `use_sliding_window` is true, else None."""
    is_used = flag(keys, "use_sliding_window")
    return same_window(keys, num_layers) if is_used else on_no_layer(keys, num_layers)


def windows_if_used(keys: Keys, num_layers: int) -> Windows:
    """Return windows by `layer_types`; without it, layers from `max_window_layers` on have one.

    No layer has one unless `use_sliding_window` is true.
    """
    window = _window(keys) if flag(keys, "use_sliding_window") else None
    first = count(keys, "max_window_layers", 28, minimum=0)
    return _by_type(keys, num_layers, window, lambda layer: layer >= first)


def windows_between(keys: Keys, num_layers: int) -> Windows:
    """Return windows by `layer_types`; without it, every `sliding_window_pattern`-th has none."""
    period = count(keys, "sliding_window_pattern", 6)
    return _by_type(keys, num_layers, _window(keys), lambda layer: (layer + 1) % period != 0)


def windows_by_turns(keys: Keys, num_layers: int) -> Windows:
    """Return windows by `layer_types`; without it, layers 0, 2, 4 and so on have one."""
    return _by_type(keys, num_layers, _window(keys, 128), lambda layer: layer % 2 == 0)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, where a router selects `top_k` experts for each token.

    Attributes:
        intermediate_size: The inner size of each expert.
        is_normalized: Whether the weights of a token's experts are normalized to sum to 1.
        has_bias: Whether experts and router have biases.
        is_stacked: Whether the checkpoint stores all experts in one transposed tensor, in which
            rows of gate and up alternate.
        shared_size: The inner size of the gated expert that processes every token; 0 if none.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    is_normalized: bool
    has_bias: bool = False
    is_stacked: bool = False
    shared_size: int = 0


# The experts of each layer; None: the feed-forward is dense.
ExpertLayers = tuple[Experts | None, ...]


def sparse_layers(keys: Keys, num_layers: int) -> ExpertLayers:
    """Return experts for every `decoder_sparse_step`-th layer, except for `mlp_only_layers`."""
    # transformers 5 writes num_local_experts, earlier releases num_experts.
    key = "num_experts" if keys.get("num_experts") is not None else "num_local_experts"
    num_experts = count(keys, key, 128, minimum=0)
    if num_experts == 0:
        return on_no_layer(keys, num_layers)
    top_k, size = _top_k(keys, 8, num_experts), count(keys, "moe_intermediate_size", 768)
    experts = Experts(num_experts, top_k, size, flag(keys, "norm_topk_prob"))
    return _on_some_layers(experts, keys, num_layers)


def sparse_layers_with_shared(keys: Keys, num_layers: int) -> ExpertLayers:
    """Return the same layers as `sparse_layers`, with a shared expert in each mixture."""
    num_experts = count(keys, "num_experts", 512, minimum=0)
    if num_experts == 0:
        return on_no_layer(keys, num_layers)
    experts = Experts(
        num_experts,
        _top_k(keys, 10, num_experts),
        count(keys, "moe_intermediate_size", 512),
        flag(keys, "norm_topk_prob", default=True),
        shared_size=count(keys, "shared_expert_intermediate_size", 512),
    )
    return _on_some_layers(experts, keys, num_layers)


def _on_some_layers(experts: Experts, keys: Keys, num_layers: int) -> ExpertLayers:
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(it) is int for it in dense):
        raise ModelError(f"mlp_only_layers is {dense!r}, not a list of layers' numbers")
    period = count(keys, "decoder_sparse_step", 1)
    return tuple(
        None if layer in dense or (layer + 1) % period else experts for layer in range(num_layers)
    )


def stacked_experts(keys: Keys, num_layers: int) -> ExpertLayers:
    """Return the same experts for every layer, with `intermediate_size` as their inner size."""
    num_experts = count(keys, "num_local_experts", 128)
    experts = Experts(
        num_experts,
        _top_k(keys, 4, num_experts),
        count(keys, "intermediate_size"),
        is_normalized=True,
        has_bias=True,
        is_stacked=True,
    )
    return (experts,) * num_layers


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a gated delta net: linear attention with a recurrent state instead of KV.

    Attributes:
        num_heads: The number of key heads, each of which has `values_per_key` value heads.
        width: The kernel width, in tokens, of the convolution before the delta rule.
    """

    num_heads: int
    values_per_key: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """The number of channels per key head in the convolution: query, key and values."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    @property
    def state_size(self) -> int:
        """The number of values in the recurrent state of one key head."""
        matrices = self.values_per_key * self.key_dim * self.value_dim
        return self.channels * (self.width - 1) + matrices


# The delta net heads of each layer; None: the layer has softmax attention.
DeltaLayers = tuple[DeltaHeads | None, ...]


def delta_between(keys: Keys, num_layers: int) -> DeltaLayers:
    """Return which layers are linear attention (delta nets), by `layer_types`.

    By default, every `full_attention_interval`-th layer is full attention, all others are linear.
    """
    if keys.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"hidden_act is {keys['hidden_act']!r}; with linear_attention it is silu")
    num_keys = count(keys, "linear_num_key_heads", 16)
    num_values = count(keys, "linear_num_value_heads", 32)
    if num_values % num_keys:
        raise ModelError(
            f"linear_num_value_heads is {num_values}, no multiple of linear_num_key_heads = "
            f"{num_keys}"
        )
    heads = DeltaHeads(
        num_keys,
        num_values // num_keys,
        count(keys, "linear_key_head_dim", 128),
        count(keys, "linear_value_head_dim", 128),
        count(keys, "linear_conv_kernel_dim", 4, minimum=2),
    )
    period = count(keys, "full_attention_interval", 4)
    types = _layer_types(keys, num_layers, "linear_attention")
    if types is None:
        return tuple(heads if (layer + 1) % period else None for layer in range(num_layers))
    return tuple(heads if it == "linear_attention" else None for it in types)


def one_rope(keys: Keys, head_dim: int, max_positions: int) -> Ropes:
    """Parse a rotary embedding that all layers share."""
    rope = read_rope(keys, head_dim, max_positions)
    return Ropes(rope, rope)


def one_rope_or_yarn(keys: Keys, head_dim: int, max_positions: int) -> Ropes:
    """Parse a rotary embedding that all layers share; the default is YaRN with gpt-oss's values."""
    given = {key: value for key, value in keys.items() if value}
    if "rope_scaling" not in given and "rope_parameters" not in given:
        given["rope_scaling"] = _YARN
    return one_rope({"rope_theta": 150_000.0, **given}, head_dim, max_positions)


def one_rope_of_a_part(keys: Keys, head_dim: int, max_positions: int) -> Ropes:
    """Parse a rotary embedding that rotates only `partial_rotary_factor` (0.25) of each head."""
    key, parameters = "partial_rotary_factor", keys.get("rope_parameters")
    nested = parameters if isinstance(parameters, dict) else {}
    part = positive({**keys, **nested}, key, 0.25)
    num_rotated = int(head_dim * part)
    if num_rotated % 2 or not 0 < num_rotated <= head_dim:
        raise ModelError(
            f"{key} is {part}: of a head_dim of {head_dim} it must be an even number of "
            "dimensions, at least 2"
        )
    plain = {name: value for name, value in keys.items() if name != key}
    if nested:
        plain["rope_parameters"] = {name: it for name, it in nested.items() if name != key}
    rope = read_rope(plain, num_rotated, max_positions)
    rope = replace(rope, num_still=head_dim - num_rotated)
    return Ropes(rope, rope)


def ropes_by_type(keys: Keys, head_dim: int, max_positions: int) -> Ropes:
    """Parse different rotary embeddings for full and sliding-window attention layers.

    Transformers 5 stores them in `rope_parameters`; earlier releases have `rope_theta` and
    `rope_scaling` for full attention, and `rope_local_base_freq` for sliding windows.
    """
    by_type, scaling = keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {}
    types = ("full_attention", "sliding_attention")
    parts = [*by_type.values(), scaling] if isinstance(by_type, dict) else [by_type]
    if not all(isinstance(it, dict) for it in parts) or not set(by_type) <= set(types):
        raise ModelError(f"rope_parameters must have an object for each of {', '.join(types)}")
    everywhere, windowed = (by_type.get(it, {}) for it in types)

    def rope(parameters: Keys, key: str, theta: float) -> Rope:
        plain = {"rope_theta": positive(keys, key, theta), "rope_parameters": parameters}
        return read_rope(plain, head_dim, max_positions)

    return Ropes(
        rope({**everywhere, **scaling}, "rope_theta", 1_000_000.0),
        rope(windowed, "rope_local_base_freq", 10_000.0),
    )


class Family(NamedTuple):
    """The defaults and parsers of a `model_type`; see also `worker.model.config.ModelConfig`.

    Attributes:
        num_kv_heads: The default; None: the number of query heads.
        head_dim: The default; None: hidden_size / num_attention_heads.
        attention_bias: Whether query, key and value have biases.  None: the key attention_bias
            decides for them and for the output projection, with `is_biased` as its default.
        has_mlp_bias: Whether the key mlp_bias is read.
        num_heads, vocab_size: The defaults; None: config.json must have the key.
        query_scalar: The default of `query_pre_attn_scalar`, whose inverse square root scales
            attention scores; None: the family scales by head_dim.
        scaled_embedding: Whether embeddings are multiplied by the square root of hidden_size.
        is_clamped: Whether the activation is gpt-oss's clamped SwiGLU.
        windows, experts, delta: Parse the values for each layer, given the number of layers.
        ropes: Parses the rotary embeddings, given the head size and the maximum position.
    """

    num_kv_heads: int | None
    head_dim: int | None
    max_positions: int
    attention_bias: bool | None
    has_mlp_bias: bool = False
    num_heads: int | None = None
    vocab_size: int | None = None
    qk_norm: bool = False
    post_norms: bool = False
    norm_shift: float = 0.0
    query_scalar: float | None = None
    scaled_embedding: bool = False
    tied_embeddings: bool = False
    is_biased: bool = False
    has_sinks: bool = False
    has_output_gate: bool = False
    is_clamped: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    windows: Callable[[Keys, int], Windows] = on_no_layer
    experts: Callable[[Keys, int], ExpertLayers] = on_no_layer
    delta: Callable[[Keys, int], DeltaLayers] = on_no_layer
    ropes: Callable[[Keys, int, int], Ropes] = one_rope


_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA3 = Family(
    4,
    256,
    131_072,
    None,
    num_heads=8,
    vocab_size=262_208,
    qk_norm=True,
    post_norms=True,
    norm_shift=1.0,
    query_scalar=256.0,
    scaled_embedding=True,
    tied_embeddings=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    windows=windows_between,
    ropes=ropes_by_type,
)
FAMILIES: Final = {
    "llama": Family(None, None, 2048, None, has_mlp_bias=True),
    "mistral": Family(8, None, 131_072, False, windows=same_window),
    "qwen2": Family(32, None, 32_768, True, windows=windows_if_used),
    "qwen3": Family(32, 128, 32_768, None, qk_norm=True, windows=windows_if_used),
    "qwen3_moe": Family(
        4, None, 32_768, None, qk_norm=True, windows=same_window_if_used, experts=sparse_layers
    ),
    "qwen3_next": Family(
        2,
        256,
        32_768,
        None,
        num_heads=16,
        vocab_size=151_936,
        qk_norm=True,
        norm_shift=1.0,
        has_output_gate=True,
        experts=sparse_layers_with_shared,
        delta=delta_between,
        ropes=one_rope_of_a_part,
    ),
    "gpt_oss": Family(
        8,
        64,
        131_072,
        None,
        num_heads=64,
        vocab_size=201_088,
        is_biased=True,
        has_sinks=True,
        is_clamped=True,
        windows=windows_by_turns,
        experts=stacked_experts,
        ropes=one_rope_or_yarn,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,  # multimodal; only the text part is loaded
}


def _by_type(
    keys: Keys, num_layers: int, window: int | None, is_windowed: Callable[[int], bool]
) -> Windows:
    """Return `window` for sliding-window layers, by `layer_types` or, if missing, a rule."""
    types = _layer_types(keys, num_layers, "sliding_attention")
    if types is None:
        return tuple(window if is_windowed(layer) else None for layer in range(num_layers))
    if window is None and "sliding_attention" in types:
        raise ModelError(
            "layer_types has sliding_attention without sliding_window, or with "
            "use_sliding_window off"
        )
    return tuple(window if it == "sliding_attention" else None for it in types)


def _layer_types(keys: Keys, num_layers: int, other: str) -> list[str] | None:
    """Return `layer_types`, each full_attention or `other`; None if the key is missing."""
    types = keys.get("layer_types")
    if types is None:
        return None
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or not set(types) <= {"full_attention", other}:
        raise ModelError(f"layer_types must name full_attention or {other} for {num_layers} layers")
    return list(types)


def _top_k(keys: Keys, default: int, num_experts: int) -> int:
    top_k = count(keys, "num_experts_per_tok", default)
    if top_k > num_experts:
        raise ModelError(f"num_experts_per_tok is {top_k}, more than the {num_experts} experts")
    return top_k


def _window(keys: Keys, default: int = 4096) -> int | None:
    # If the key is missing, use the family's default; an explicit null means no window.
    if "sliding_window" in keys and keys["sliding_window"] is None:
        return None
    return count(keys, "sliding_window", default)
