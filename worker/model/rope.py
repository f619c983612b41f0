"""Rotary position embeddings: the frequencies a config asks for, and the angles of positions.

Frequencies: plain, scaled linearly, or as in Llama 3 (high frequencies kept, low ones divided, a
ramp between).  Both spellings of config.json are read: `rope_parameters` (transformers 5) and
`rope_theta` with `rope_scaling`.  Other types (yarn, dynamic, longrope) are refused.  Pairs are
(i, i + D / 2), as in every checkpoint of Hugging Face; angles are float32 in any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Llama3Scaling(NamedTuple):
    """Wavelengths up to original / high_freq stay, those over original / low_freq are divided."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of `head_dim` dimensions, base `theta`; `scaling`: none, a divisor, Llama 3's."""

    head_dim: int
    theta: float
    scaling: float | Llama3Scaling | None = None


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
            raise ValueError("partial_rotary_factor: only whole heads are rotated, it must be 1")
    theta = _positive(
        {"rope_theta": 10_000.0, **_only(config, "rope_theta"), **parameters}, "rope_theta"
    )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(head_dim, theta)
    if kind == "linear":
        return Rope(head_dim, theta, _positive(parameters, "factor"))
    if kind == "llama3":
        original = {"original_max_position_embeddings": max_positions, **parameters}
        original |= _only(config, "original_max_position_embeddings")
        return Rope(head_dim, theta, _llama3(original))
    raise ValueError(f"{key}: rope_type is {kind!r}, only default, linear and llama3 are supported")


def inverse_frequencies(rope: Rope, device: torch.device) -> torch.Tensor:
    """Return [D / 2] float32 angles per position."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.scaling is None:
        return plain.to(device)
    if not isinstance(rope.scaling, Llama3Scaling):
        return (plain / rope.scaling).to(device)
    factor, low, high, original = rope.scaling
    turns = original / (2 * math.pi / plain)  # over the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return ((1 - kept) * plain / factor + kept * plain).to(device)


def rotation_of(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return [T, 2, D / 2] float32 cosines and sines of [T] positions, as the kernels take them."""
    angles = positions.float()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1)


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


def _only(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: config[key]} if config.get(key) is not None else {}


def _positive(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{key} is {value!r}, not a positive number")
    return float(value)
