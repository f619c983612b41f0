"""Rotary position embeddings: the frequencies that a config asks for, and the angles of positions.

Frequencies are plain, scaled linearly, or scaled as in Llama 3 or YaRN, which keep high frequencies
and divide low ones, with a ramp between.  Both spellings of config.json are read: `rope_parameters`
(transformers 5) and `rope_theta` with `rope_scaling`.  Other types (dynamic, longrope) are refused.
Dimension i pairs with i + D / 2, as in every checkpoint of Hugging Face; angles are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from wire.process.model import ModelError
from worker.model.keys import Keys, flag, positive


class Llama3Scaling(NamedTuple):
    """Keeps wavelengths up to original / high_freq, divides those over original / low_freq."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class YarnScaling(NamedTuple):
    """Keeps frequencies of `beta_fast` turns per original context, divides those of `beta_slow`.

    Between them the kept share grows with the index of the frequency; `truncate` widens that range
    to whole numbers.  Queries and keys grow by `attention_factor`.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first `head_dim` dimensions, base `theta`; `num_still` more do not rotate.

    `scaling` is None, a divisor of all frequencies, or a rule.
    """

    head_dim: int
    theta: float
    scaling: float | Llama3Scaling | YarnScaling | None = None
    num_still: int = 0

    @property
    def score_factor(self) -> float:
        """The factor on attention scores that replaces one on both queries and keys."""
        return self.scaling.attention_factor**2 if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def order(self) -> list[int]:
        """The dimensions of a head in the order that makes all of them pairs (i, i + D / 2).

        Dimensions that do not rotate become pairs with angle 0.
        """
        rotated, whole = self.head_dim, self.head_dim + self.num_still
        first, second = range(rotated // 2), range(rotated // 2, rotated)
        middle = (rotated + whole) // 2
        return [*first, *range(rotated, middle), *second, *range(middle, whole)]


def read_rope(config: Keys, head_dim: int, max_positions: int) -> Rope:
    """Read the rotary keys of a config.json.

    Raises:
        ModelError: The type is unknown, or a parameter is missing or out of range; names the key.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(key) or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"{key} is {parameters!r}, not an object")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ModelError(f"{key} differs between layer types, which is not supported")
    for source in (parameters, config):
        if source.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError("partial_rotary_factor: this family rotates whole heads, it must be 1")
    theta = positive(parameters if "rope_theta" in parameters else config, "rope_theta", 10_000.0)
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind == "default":
        return Rope(head_dim, theta)
    if kind == "linear":
        return Rope(head_dim, theta, positive(parameters, "factor"))
    if kind not in _READERS:
        known = ", ".join(("default", "linear", *_READERS))
        raise ModelError(f"{key}: rope_type is {kind!r}, not one of {known}")
    length = "original_max_position_embeddings"
    source = parameters if config.get(length) is None else config
    original = int(positive(source, length, max_positions))
    return Rope(head_dim, theta, _READERS[kind](parameters, theta, original))


def _llama3(parameters: Keys, _theta: float, original: int) -> Llama3Scaling:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (positive(parameters, name) for name in names)
    if high <= low:
        raise ModelError("high_freq_factor must be over low_freq_factor")
    return Llama3Scaling(factor, low, high, original)


def _yarn(parameters: Keys, theta: float, original: int) -> YarnScaling:
    factor = positive(parameters, "factor")

    def growth(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = growth()
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        weights = (positive(parameters, key) for key in ("mscale", "mscale_all_dim"))
        usual = growth(next(weights)) / growth(next(weights))
    fast, slow = positive(parameters, "beta_fast", 32.0), positive(parameters, "beta_slow", 1.0)
    attention_factor = positive(parameters, "attention_factor", usual)
    truncate = flag(parameters, "truncate", default=True)
    if theta <= 1:
        raise ModelError(f"rope_theta is {theta}; yarn needs one over 1")
    if fast <= slow:
        raise ModelError("beta_fast must be over beta_slow")
    return YarnScaling(factor, fast, slow, original, attention_factor, truncate)


_READERS: Final[dict[str, Callable[[Keys, float, int], Llama3Scaling | YarnScaling]]] = {
    "llama3": _llama3,
    "yarn": _yarn,
}


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


def _kept_by_yarn(rope: Rope, scaling: YarnScaling) -> torch.Tensor:
    """Return [D / 2] shares of each frequency that are kept."""

    def index_of(turns: float) -> float:
        """Return the index of the frequency that turns so often over the original context."""
        wavelength = scaling.original_max_positions / turns / (2 * math.pi)
        return rope.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, rope.head_dim - 1.0)
    # An empty range is a step; transformers gives it this width.
    width = last - first or 0.001
    indices = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    return 1 - ((indices - first) / width).clamp(0.0, 1.0)


def rotation_of(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return [..., T, 2, D / 2] float32 cosines and sines of [T] positions, as kernels take them.

    `frequencies` are [..., D / 2] float32: for all ropes at once a GPU starts three kernels.
    """
    angles = positions[:, None] * frequencies[..., None, :]
    rotation = angles.new_empty(*angles.shape[:-1], 2, angles.shape[-1])
    torch.cos(angles, out=rotation[..., 0, :])
    torch.sin(angles, out=rotation[..., 1, :])
    return rotation
