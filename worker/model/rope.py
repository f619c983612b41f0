"""Rotary position embeddings (RoPE): parses their config and computes cosines and sines.

Frequencies are unscaled, scaled linearly, or scaled as in Llama 3 or YaRN, which keep high
frequencies and divide low ones, with a linear ramp in between.  Both forms of config.json are
supported: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling`.  Other types
(dynamic, longrope) raise ModelError.  Dimension i is rotated with dimension i + D / 2, as in all
Hugging Face checkpoints; angles are float32.
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
    """The scaling of Llama 3, which keeps high frequencies and divides low ones by `factor`.

    Frequencies with over `high_freq_factor` turns per original context are kept, those with under
    `low_freq_factor` are divided; in between, a ramp over the number of turns mixes both.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class YarnScaling(NamedTuple):
    """The scaling of YaRN, which keeps high frequencies and divides low ones by `factor`.

    Frequencies with over `beta_fast` turns per original context are kept, those with under
    `beta_slow` are divided; in between, a ramp over the frequency's index mixes both.  `truncate`
    widens the ramp to integer bounds.  Queries and keys are multiplied by `attention_factor`.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates the first `head_dim` dimensions of a head, but not the `num_still` after them.

    `theta` is the base of the frequencies.  `scaling` as a number divides all frequencies.
    """

    head_dim: int
    theta: float
    scaling: float | Llama3Scaling | YarnScaling | None = None
    num_still: int = 0

    @property
    def score_factor(self) -> float:
        """The factor on attention scores that is equivalent to scaling queries and keys."""
        return self.scaling.attention_factor**2 if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def order(self) -> list[int]:
        """The permutation of a head's D dimensions after which all pairs are (i, i + D / 2).

        Dimensions that are not rotated are also paired, with angle 0.
        """
        rotated, whole = self.head_dim, self.head_dim + self.num_still
        first, second = range(rotated // 2), range(rotated // 2, rotated)
        middle = (rotated + whole) // 2
        return [*first, *range(rotated, middle), *second, *range(middle, whole)]


def read_rope(config: Keys, head_dim: int, max_positions: int) -> Rope:
    """Parse the RoPE keys of a config.json.

    Raises:
        ModelError: The type is unknown, or a parameter is missing or out of range.
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
    """Return [D / 2] float32 radians per position for each pair, in the rope's `order`."""
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
    """Return [D / 2] weights in [0, 1] of the unscaled frequencies in YaRN's mix."""

    def index_of(turns: float) -> float:
        """Return the (fractional) index of the frequency with this many turns per context."""
        wavelength = scaling.original_max_positions / turns / (2 * math.pi)
        return rope.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, rope.head_dim - 1.0)
    # Avoid division by zero for an empty ramp, with the same width as transformers.
    width = last - first or 0.001
    indices = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    return 1 - ((indices - first) / width).clamp(0.0, 1.0)


def rotation_of(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return [..., T, 2, D / 2] float32 cosines and sines of [T] positions.

    `frequencies` are [..., D / 2] float32.  Passing those of all ropes at once saves GPU launches.
    """
    angles = positions[:, None] * frequencies[..., None, :]
    rotation = angles.new_empty(*angles.shape[:-1], 2, angles.shape[-1])
    torch.cos(angles, out=rotation[..., 0, :])
    torch.sin(angles, out=rotation[..., 1, :])
    return rotation
