"""Rotary position embeddings: the frequencies a config asks for, and the angles of positions.

Frequencies: plain, scaled linearly, or as in Llama 3 and YaRN (high frequencies kept, low ones
divided, a ramp between).  Both spellings of config.json are read: `rope_parameters` (transformers
5) and `rope_theta` with `rope_scaling`.  Other types (dynamic, longrope) are refused.  Pairs are
(i, i + D / 2), as in every checkpoint of Hugging Face; angles are float32 in any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch


class Llama3Scaling(NamedTuple):
    """Wavelengths up to original / high_freq stay, those over original / low_freq are divided."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class YarnScaling(NamedTuple):
    """What turns `beta_fast` times over the original context stays, `beta_slow` times is divided.

    Between them the share grows with the number of the frequency; `truncate` widens that range to
    whole numbers.  Queries and keys grow by `attention_factor`.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first `head_dim` dimensions, base `theta`; `num_still` more stay as they are.

    `scaling`: none, a divisor, or a rule.
    """

    head_dim: int
    theta: float
    scaling: float | Llama3Scaling | YarnScaling | None = None
    num_still: int = 0

    @property
    def score_factor(self) -> float:
        """What scores are multiplied with, which saves doing so to both query and key."""
        return self.scaling.attention_factor**2 if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def order(self) -> list[int]:
        """The dimensions of a head, ordered so that all of them are pairs (i, i + D / 2).

        Those that stay are pairs, too, whose angle is 0.
        """
        rotated, whole = self.head_dim, self.head_dim + self.num_still
        first, second = range(rotated // 2), range(rotated // 2, rotated)
        middle = (rotated + whole) // 2
        return [*first, *range(rotated, middle), *second, *range(middle, whole)]


def read_rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    """Read the rotary keys of a config.json.

    Raises:
        ValueError: A type that is not known, or a parameter missing or out of range; names the key.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(key) or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"{key} is {parameters!r}, not an object")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError(f"{key} differs between layer types, which is not supported")
    for source in (parameters, config):
        if source.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor: this family rotates whole heads, it must be 1")
    theta = _positive(
        {"rope_theta": 10_000.0, **_only(config, "rope_theta"), **parameters}, "rope_theta"
    )
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind == "default":
        return Rope(head_dim, theta)
    if kind == "linear":
        return Rope(head_dim, theta, _positive(parameters, "factor"))
    if kind in _READERS:
        original = {"original_max_position_embeddings": max_positions, **parameters}
        original |= _only(config, "original_max_position_embeddings") | {"rope_theta": theta}
        return Rope(head_dim, theta, _READERS[kind](original))
    known = ", ".join(("default", "linear", *_READERS))
    raise ValueError(f"{key}: rope_type is {kind!r}, not one of {known}")


def inverse_frequencies(rope: Rope, device: torch.device) -> torch.Tensor:
    """Return [D / 2] float32 angles per position, of pairs in the rope's `order`."""
    still = torch.zeros(rope.num_still // 2)
    return torch.cat((_frequencies(rope), still)).to(device)


def _frequencies(rope: Rope) -> torch.Tensor:
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.scaling is None:
        return plain
    if isinstance(rope.scaling, float):
        return plain / rope.scaling
    if isinstance(rope.scaling, YarnScaling):
        kept = _kept_by_yarn(rope, rope.scaling)
    else:
        _, low, high, original = rope.scaling
        turns = original / (2 * math.pi / plain)  # over the original context
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.scaling.factor + kept * plain


def rotation_of(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return [..., T, 2, D / 2] float32 cosines and sines of [T] positions, as kernels take them.

    Args:
        frequencies: [..., D / 2] float32: of all ropes at once a GPU starts three kernels.
    """
    angles = positions[:, None] * frequencies[..., None, :]
    rotation = angles.new_empty(*angles.shape[:-1], 2, angles.shape[-1])
    torch.cos(angles, out=rotation[..., 0, :])
    torch.sin(angles, out=rotation[..., 1, :])
    return rotation


def _kept_by_yarn(rope: Rope, scaling: YarnScaling) -> torch.Tensor:
    """Return [D / 2] which share of each frequency is kept."""

    def index_of(turns: float) -> float:
        """Return the place of the frequency that turns so often over the original context."""
        wavelength = scaling.original_max_positions / turns / (2 * math.pi)
        return rope.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, rope.head_dim - 1.0)
    # A range of nothing is a step; that it is so wide is the custom of others.
    width = last - first or 0.001
    places = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    return 1 - ((places - first) / width).clamp(0.0, 1.0)


def _llama3(parameters: Mapping[str, Any]) -> Llama3Scaling:
    scaling = Llama3Scaling(
        _positive(parameters, "factor"),
        _positive(parameters, "low_freq_factor"),
        _positive(parameters, "high_freq_factor"),
        int(_positive(parameters, "original_max_position_embeddings")),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError("high_freq_factor must be over low_freq_factor")
    return scaling


def _yarn(parameters: Mapping[str, Any]) -> YarnScaling:
    factor = _positive(parameters, "factor")

    def growth(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": growth()}
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        both = (_positive(parameters, key) for key in ("mscale", "mscale_all_dim"))
        given["attention_factor"] = growth(next(both)) / growth(next(both))
    given |= {key: _positive(parameters, key) for key in given if parameters.get(key) is not None}
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"truncate is {truncate!r}, not true or false")
    if parameters["rope_theta"] <= 1:
        raise ValueError(f"rope_theta is {parameters['rope_theta']}; yarn needs one over 1")
    if given["beta_fast"] <= given["beta_slow"]:
        raise ValueError("beta_fast must be over beta_slow")
    original = int(_positive(parameters, "original_max_position_embeddings"))
    return YarnScaling(factor, original_max_positions=original, truncate=truncate, **given)


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Llama3Scaling | YarnScaling]]] = {
    "llama3": _llama3,
    "yarn": _yarn,
}


def _only(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: config[key]} if config.get(key) is not None else {}


def _positive(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{key} is {value!r}, not a positive number")
    return float(value)
