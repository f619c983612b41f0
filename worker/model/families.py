"""The families of models: the defaults and rules of each `model_type`.

A family is a row of `FAMILIES`.  Its functions read the differences between layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from wire.process.model import ModelError
from worker.model.keys import Keys, count, flag, positive
from worker.model.rope import Rope, read_rope

# For each layer, how many positions a query sees, its own included; None: all.
Windows = tuple[int | None, ...]


class Ropes(NamedTuple):
    """The rotation in layers that see all positions, and in those with a window."""

    everywhere: Rope
    windowed: Rope


def on_no_layer(_keys: Keys, num_layers: int) -> tuple[None, ...]:
    """No layer has a window, or experts, or a state."""
    return (None,) * num_layers


def same_window(keys: Keys, num_layers: int) -> Windows:
    """Every layer has `sliding_window`."""
    return (_window(keys),) * num_layers


def same_window_if_used(keys: Keys, num_layers: int) -> Windows:
    """With `use_sliding_window`, every layer has `sliding_window`."""
    is_used = flag(keys, "use_sliding_window")
    return same_window(keys, num_layers) if is_used else on_no_layer(keys, num_layers)


def windows_if_used(keys: Keys, num_layers: int) -> Windows:
    """With `use_sliding_window`, layers by `layer_types`, or those from `max_window_layers` on."""
    window = _window(keys) if flag(keys, "use_sliding_window") else None
    first = count(keys, "max_window_layers", 28, minimum=0)
    return _by_type(keys, num_layers, window, lambda layer: layer >= first)


def windows_between(keys: Keys, num_layers: int) -> Windows:
    """Layers by `layer_types`, or all but each `sliding_window_pattern`-th."""
    period = count(keys, "sliding_window_pattern", 6)
    return _by_type(keys, num_layers, _window(keys), lambda layer: (layer + 1) % period != 0)


def windows_by_turns(keys: Keys, num_layers: int) -> Windows:
    """Layers by `layer_types`, or every second from the first on."""
    return _by_type(keys, num_layers, _window(keys, 128), lambda layer: layer % 2 == 0)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a router sends each token to `top_k` of them.

    Attributes:
        intermediate_size: The size of each expert.
        is_normalized: Whether the weights of a token's experts add up to 1.
        has_bias: Whether experts and router have biases.
        is_stacked: Whether a checkpoint has one transposed matrix of all experts, in which rows of
            gate and up alternate.
        shared_size: The size of the expert that every token goes to, with its own gate; 0: none.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    is_normalized: bool
    has_bias: bool = False
    is_stacked: bool = False
    shared_size: int = 0


# For each layer; None: its feed-forward is dense.
ExpertLayers = tuple[Experts | None, ...]


def sparse_layers(keys: Keys, num_layers: int) -> ExpertLayers:
    """Every `decoder_sparse_step`-th layer has experts, but not those of `mlp_only_layers`."""
    # transformers 5 writes num_local_experts, checkpoints from before it have num_experts.
    key = "num_experts" if keys.get("num_experts") is not None else "num_local_experts"
    num_experts = count(keys, key, 128, minimum=0)
    if num_experts == 0:
        return on_no_layer(keys, num_layers)
    top_k, size = _top_k(keys, 8, num_experts), count(keys, "moe_intermediate_size", 768)
    experts = Experts(num_experts, top_k, size, flag(keys, "norm_topk_prob"))
    return _on_some_layers(experts, keys, num_layers)


def sparse_layers_with_shared(keys: Keys, num_layers: int) -> ExpertLayers:
    """As `sparse_layers`, with a shared expert."""
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
    """Every layer has experts of `intermediate_size`, stacked in the checkpoint."""
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
    """The heads of a gated delta net, which keeps a state instead of keys and values.

    Attributes:
        num_heads: Key heads; each has `values_per_key` value heads.
        width: How many tokens the convolution before it sees.
    """

    num_heads: int
    values_per_key: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """The size of a head's query, key and values together, which the convolution reads."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    @property
    def state_size(self) -> int:
        """The size of the state of one head."""
        matrices = self.values_per_key * self.key_dim * self.value_dim
        return self.channels * (self.width - 1) + matrices


# For each layer; None: it has attention.
DeltaLayers = tuple[DeltaHeads | None, ...]


def delta_between(keys: Keys, num_layers: int) -> DeltaLayers:
    """Layers by `layer_types`, or all but each `full_attention_interval`-th."""
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
    """All layers have the same rotation."""
    rope = read_rope(keys, head_dim, max_positions)
    return Ropes(rope, rope)


def one_rope_or_yarn(keys: Keys, head_dim: int, max_positions: int) -> Ropes:
    """All layers have the same rotation; YaRN is the default."""
    given = {key: value for key, value in keys.items() if value}
    if "rope_scaling" not in given and "rope_parameters" not in given:
        given["rope_scaling"] = _YARN
    return one_rope({"rope_theta": 150_000.0, **given}, head_dim, max_positions)


def one_rope_of_a_part(keys: Keys, head_dim: int, max_positions: int) -> Ropes:
    """All layers rotate `partial_rotary_factor` of each head, a quarter by default."""
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
    """Layers rotate by the `rope_parameters` of their type.

    Before transformers 5 these were `rope_theta` with `rope_scaling`, and `rope_local_base_freq`.
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
    """The defaults and the rules of a `model_type`; see also `worker.model.config.ModelConfig`.

    Attributes:
        num_kv_heads: None: as many as query heads.
        head_dim: None: hidden_size / num_attention_heads.
        attention_bias: For query, key and value; None: the key attention_bias decides, for the
            output as well, with `is_biased` as its default.
        has_mlp_bias: Whether the key mlp_bias counts.
        num_heads: None: config.json must name it; `vocab_size` likewise.
        query_scalar: The default of `query_pre_attn_scalar`, by whose root queries are divided;
            None: the head_dim.
        scaled_embedding: Whether embeddings are multiplied by the root of their size.
        is_clamped: Whether the gate is the clamped one of gpt-oss, with `swiglu_alpha`.
        windows: Reads the windows of so many layers; `experts` and `delta` likewise.
        ropes: Reads the rotation of heads of this size, up to so many positions.
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
    "gemma3": _GEMMA3,  # with images, which are not read: see `ModelConfig.is_multimodal`
}


def _by_type(
    keys: Keys, num_layers: int, window: int | None, is_windowed: Callable[[int], bool]
) -> Windows:
    """Give layers this window by `layer_types`, or by a rule where that is missing."""
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
    """Return the type of each layer, full_attention or `other`; None: the key is missing."""
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
    # A missing key means the families' default, an explicit null means no window.
    if "sliding_window" in keys and keys["sliding_window"] is None:
        return None
    return count(keys, "sliding_window", default)
