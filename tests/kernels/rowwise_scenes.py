"""Rows to norm and to gate, against the formula in float64, with NaN on both sides of them."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

from kernels import GELU_TANH, SILU, Activation
from kernels.contract import Backend
from tests.kernels.scenes import ROUNDING

# As gpt-oss has it.
CLAMPED = Activation(1.702, 0.0, limit=7.0, shift=1.0)
EPS = 1e-5
# One value; less than a warp; whole units, few and many; ragged ends; units left for a second turn.
SIZES = [1, 7, 64, 576, 2056, 4097, 4104]
# 29 are more than the blocks that the shim's device wants.
ROWS = [1, 29]
# Half the smallest float16 above zero.
SMALLEST = 2.0**-25
MARGIN = 16


def check_all(serving: Backend, dtype: torch.dtype, size: int, device: str = "cpu") -> None:
    for rows in ROWS:
        for skip in (0, 1):
            check_norm(serving, dtype, rows, size, skip, device)
            check_gate(serving, dtype, rows, size, skip, device)


def check_norm(
    serving: Backend, dtype: torch.dtype, rows: int, size: int, skip: int, device: str
) -> None:
    hidden, y = (random((rows, size), dtype, seed, skip, device) for seed in (1, 2))
    # Rows of very different length: the mean of another would be seen, and eps is most of the last.
    hidden *= torch.logspace(1, -3, rows, device=device, dtype=dtype)[:, None]
    y[-1] *= 1e-3
    weight = random((size,), torch.float32, 3, skip, device)
    compare(serving.rms_norm(hidden, weight, EPS), normed(hidden, weight))
    added = (hidden.float() + y.float()).to(dtype)
    got = serving.add_rms_norm(hidden, y, weight, EPS)
    assert torch.equal(hidden, added)
    compare(got, normed(added, weight))


def check_gate(
    serving: Backend, dtype: torch.dtype, rows: int, size: int, skip: int, device: str
) -> None:
    gate_up = random((rows, 2 * size), dtype, 4, skip, device)
    gate_up[:, :size] *= 8
    gate, up = gate_up.double().chunk(2, dim=-1)
    compare(serving.gate(gate_up, SILU), silu(gate) * up)
    compare(serving.gate(gate_up, GELU_TANH), gelu(gate, approximate="tanh") * up)
    gate_up[:, size:] *= 4
    compare(serving.gate(gate_up, CLAMPED), clamped(*gate_up.double().chunk(2, dim=-1)))


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gate of `CLAMPED`."""
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


def random(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, skip: int, device: str
) -> torch.Tensor:
    """Return normal values with NaN on both sides; `skip` values off the boundary of 16 bytes."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    whole = torch.full((MARGIN + skip + values.numel() + MARGIN,), torch.nan, device=device)
    found = whole.to(dtype)[MARGIN + skip :][: values.numel()].view(shape)
    found.copy_(values)
    return found


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def compare(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=SMALLEST)
