"""The gated delta rule and its convolution (linear attention), in torch on any device.

The state of a head is a matrix S.  Each token decays S, then moves the value that S has for the
token's key by a fraction `beta` towards the token's value.  With `decay` the logarithm of the
factor by which S decays,

    S = exp(decay) S;   S = S + k (beta (v - k S));   out = q S        (k and q as column and row)

Runs of one token, as in decode, are computed in parallel.  A longer run is computed in chunks of
`PART` tokens.  Within a chunk all differences d_i = beta_i (v_i - k_i S_i) are found at once: S_i
is the decayed state from before the chunk plus what the differences before i have added, so the
differences solve a triangular system.  Where a run is split changes the last bits.

States and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import silu

from kernels.contract import Run, Singles, States

# Tokens of a chunk: enough for whole tiles of a matrix product, few enough that solving the
# triangular system costs little beside it.
PART = 64


def plan_runs(pool: torch.Tensor, runs: Sequence[Run]) -> States:
    """Separate the runs of a step that are computed in parallel from those computed in order."""
    written = {run.after for run in runs}
    read = {run.before for run in runs}
    alone, longer = list[Run](), list[Run]()
    for run in runs:
        is_free = run.before not in written and run.after not in read
        (alone if run.stop - run.start == 1 and is_free else longer).append(run)
    columns = [(it.start, it.before or 0, it.after, it.before is None) for it in alone]
    table = torch.tensor(columns, dtype=torch.int64).reshape(-1, 4).to(pool.device)
    rows, before, after, is_new = table.unbind(1)
    return States(pool, Singles(rows, before, after, is_new.bool()), tuple(longer))


def convolve(
    x: torch.Tensor, weight: torch.Tensor, memory: torch.Tensor, states: States
) -> torch.Tensor:
    """Return [T, H, C] SiLU of each channel's weighted sum over a token and the tokens before it.

    Args:
        x: [T, H, C] float32.
        weight: [H, C, W]; the last of W is the weight of the token itself.
        memory: [slots, H, C, W - 1] the inputs before each run; a view of the pool, updated in
            place.
    """
    out = torch.empty_like(x)
    rows, before, after, is_new = states.singles
    if len(rows):
        # [S, H, C, W]
        seen = torch.cat((_read(memory, before, is_new), x[rows][..., None]), dim=-1)
        memory[after] = seen[..., 1:]
        out[rows] = (seen * weight).sum(-1)
    width = weight.shape[-1]
    for run in states.longer:
        earlier = torch.zeros_like(memory[0]) if run.before is None else memory[run.before]
        # [W - 1 + t, H, C]
        seen = torch.cat((earlier.permute(2, 0, 1), x[run.start : run.stop]))
        sums = out[run.start : run.stop].zero_()
        for place in range(width):
            sums.addcmul_(seen[place : place + len(sums)], weight[..., place])
        memory[run.after] = seen[len(sums) :].permute(1, 2, 0)
    return silu(out)


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    memory: torch.Tensor,
    states: States,
) -> torch.Tensor:
    """Return [T, H, R, V] outputs of the gated delta rule; R states share a query and a key.

    Args:
        query: [T, H, K] float32; `key` has the same shape.
        value: [T, H, R, V].
        decay: [T, H, R], at most 0; `beta` has the same shape, from 0 to 1.
        memory: [slots, H, R, K, V] states; a view of the pool, updated in place.
    """
    out = torch.empty_like(value)
    rows, before, after, is_new = states.singles
    if len(rows):
        matrix = _read(memory, before, is_new) * decay[rows].exp()[..., None, None]
        row_of_key = key[rows][:, :, None, None]
        known = row_of_key @ matrix
        missing = beta[rows][..., None, None] * (value[rows][..., None, :] - known)
        matrix += row_of_key.mT * missing
        out[rows] = (query[rows][:, :, None, None] @ matrix).squeeze(-2)
        memory[after] = matrix
    for run in states.longer:
        matrix = torch.zeros_like(memory[0]) if run.before is None else memory[run.before]
        for start in range(run.start, run.stop, PART):
            part = slice(start, min(start + PART, run.stop))
            # [H, R, t, ...]
            found, matrix = _through(
                query[part].transpose(0, 1)[:, None],
                key[part].transpose(0, 1)[:, None],
                value[part].permute(1, 2, 0, 3),
                decay[part].permute(1, 2, 0),
                beta[part].permute(1, 2, 0)[..., None],
                matrix,
            )
            out[part] = found.permute(2, 0, 1, 3)
        memory[run.after] = matrix
    return out


def _read(memory: torch.Tensor, slots: torch.Tensor, is_new: torch.Tensor) -> torch.Tensor:
    """Return a copy of the states, with zeros for new sequences."""
    states = memory[slots]
    states[is_new] = 0
    return states


def _through(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    matrix: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of one chunk's queries, and the state after the chunk."""
    total = decay.cumsum(-1)
    left = total.exp()[..., None]  # decay of the earlier state at each token
    # Entry (i, j) is the decay at token i of what token j added; 0 for later tokens j.
    steps = total[..., :, None] - total[..., None, :]
    later = torch.ones_like(steps[0, 0], dtype=torch.bool).triu(1)
    left_of = steps.masked_fill(later, -torch.inf).exp()
    system = beta * (key @ key.mT) * left_of
    alone = beta * (value - left * (key @ matrix))
    missing = torch.linalg.solve_triangular(system, alone, upper=False, unitriangular=True)
    found = left * (query @ matrix) + ((query @ key.mT) * left_of) @ missing
    kept = key * left_of[..., -1, :, None]
    return found, left[..., -1:, :] * matrix + kept.mT @ missing
