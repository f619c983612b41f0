"""Rows of every kind to draw from: a backend must draw the tokens that the CPU draws."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels import SAMPLING
from kernels.contract import Backend
from kernels.cpu import backend as cpu

TINY = float(np.finfo(np.float32).smallest_subnormal)
# The values of a row: the spread of normal ones, or a list to choose from.
KINDS: dict[str, float | list[float]] = {
    "peaked": 4.0,
    "flat": 0.05,
    "wide": 300.0,
    "equal": [2.5],
    "tied": [1.0, math.nextafter(1.0, 2.0), 0.5, 0.0, -0.0, -1.0, -math.inf],
    "neighbours": [1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1.0 + 2**-22],
    "zeros": [-0.0, 0.0, -1.0],
    "subnormal": [0.0, -0.0, TINY, 2 * TINY, -TINY],
    "impossible": [-math.inf, -math.inf, -math.inf, 1.0],
    "nothing": [-math.inf],
    "infinite": [math.inf, 0.0, 3.0, -math.inf],
    "broken": [math.nan, 0.0, 1.0, -math.nan],
    "negative and broken": [-math.nan, 0.0, 1.0],
}
# Less than a warp; a warp; ragged; a run of several tokens for each thread; more than 256 threads.
SIZES = [1, 31, 32, 33, 700, 2100, 9001]
FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1 << 40},
    {"top_p": 0.9},
    {"top_p": 1e-300},
    {"top_p": 1 - 2**-53},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.05},
]
TEMPERATURES = [0.0, 1.0, 0.05, 2.0, 1e-320, 1e300]
UNIFORMS = [0.0, 0.25, 0.5, 0.999, 1 - 2.0**-52]


def logits_of(kind: str, num_rows: int, size: int, seed: int) -> torch.Tensor:
    draw, made_of = np.random.default_rng(seed), KINDS[kind]
    if isinstance(made_of, float):
        rows = draw.standard_normal((num_rows, size)) * made_of
    else:
        rows = draw.choice(made_of, (num_rows, size))
    return torch.from_numpy(rows.astype(np.float32))


def settings_of(num_rows: int, seed: int, **changes: float) -> torch.Tensor:
    """Return settings of temperature 1 without filters but for changes; numbers are random."""
    rows = np.zeros(num_rows, SAMPLING)
    for name, value in {"temperature": 1.0, "top_p": 1.0, **changes}.items():
        rows[name] = value
    draw = np.random.default_rng(seed)
    numbers = np.where(
        draw.random(num_rows) < 0.5, draw.random(num_rows), draw.choice(UNIFORMS, num_rows)
    )
    rows["uniform"] = np.floor(numbers * 2.0**52) * 2.0**-52
    return torch.from_numpy(rows.view(np.int64).reshape(num_rows, -1))


def allowed_of(num_rows: int, size: int, seed: int, share: float) -> torch.Tensor:
    """Return bits of which a share is set; none in the first row, and not a word for each token."""
    draw = np.random.default_rng(seed)
    num_words = max(1, -(-size // 32) + int(draw.integers(-1, 2)))
    bits = draw.random((num_rows, num_words * 32)) < share
    bits[0] = False
    words: npt.NDArray[Any] = np.packbits(bits, axis=1, bitorder="little")
    return torch.from_numpy(words.view(np.int32))


def check(
    serving: Backend,
    logits: torch.Tensor,
    settings: torch.Tensor | None,
    allowed: torch.Tensor | None = None,
    device: str = "cpu",
) -> None:
    """Raise AssertionError unless the tokens are those of the CPU."""
    expected = cpu.draw(logits, settings, allowed)
    on_device = (None if it is None else it.to(device) for it in (settings, allowed))
    drawn = serving.draw(logits.to(device), *on_device)
    assert drawn.dtype == torch.int64 and drawn.device.type == device
    assert drawn.tolist() == expected.tolist()


def check_last_bits(serving: Backend, device: str = "cpu") -> None:
    """Check draws between two tokens that one unit of the weight, 2^-42, decides."""
    # Most of what the polynomial's last terms add, they add half-way between powers of two.
    x = np.concatenate((np.linspace(-25, 0, 60), np.linspace(-0.38, -0.31, 60))).astype(np.float32)
    weight = np.rint(np.exp(x.astype(np.float64)) * 2.0**42)
    settings = settings_of(2 * len(x), 0)
    target = np.concatenate((weight - 0.5, weight + 0.5))
    settings.numpy().view(SAMPLING)["uniform"][:, 0] = target / (np.tile(weight, 2) + 2.0**42)
    logits = torch.from_numpy(np.stack((np.tile(x, 2), np.zeros_like(target, np.float32)), axis=1))
    check(serving, logits, settings, None, device)


def check_close_border(serving: Backend, device: str = "cpu") -> None:
    """Check a top_p that the first token nearly is: a sum by digit that is short would do."""
    logits = torch.full((1, 300), -0.3)
    logits[0, 0] = 0.0
    for share in (0.9999, 1.0001):
        settings = settings_of(1, 0, top_p=share / float(logits.double().exp().sum()))
        settings.numpy().view(SAMPLING)["uniform"] = 0.999
        check(serving, logits, settings, None, device)


def check_all(
    serving: Backend, device: str = "cpu", *, num_rows: int = 3, first_seed: int = 0
) -> None:
    """Check every kind of row with every filter, also at any temperature among some tokens."""
    for number, kind in enumerate(KINDS):
        for turn, changes in enumerate(FILTERS):
            seed = first_seed + number * len(FILTERS) + turn
            choose = random.Random(seed)
            logits = logits_of(kind, num_rows, choose.choice(SIZES), seed)
            check(serving, logits, settings_of(num_rows, seed, **changes), None, device)
            settings = settings_of(
                num_rows, seed, **{"temperature": choose.choice(TEMPERATURES), **changes}
            )
            allowed = allowed_of(num_rows, logits.shape[1], seed, choose.choice((0.03, 0.5)))
            check(serving, logits, settings, allowed, device)
        check(serving, logits_of(kind, num_rows, 2100, number), None, None, device)
    check_last_bits(serving, device)
    check_close_border(serving, device)
