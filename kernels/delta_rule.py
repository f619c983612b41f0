"""The gated delta rule and its convolution, by torch on any device, from state to state.

What a head remembers is a matrix S, which each token changes: it fades, then what it has for the
token's key moves by a part `beta` towards the token's value.  With `decay` the logarithm of what is
left of S,

    S = exp(decay) S;   S = S + k (beta (v - k S));   out = q S        (k and q as column and row)

Tokens that come alone, as each generated one does, are computed side by side.  A longer run is
computed in parts of `PART` tokens.  Within a part all differences d_i = beta_i (v_i - k_i S_i) are
found at once: S_i is what the S before the part has become, plus what the differences before i
have added, so they solve a triangular system.  Where a run is cut changes the last bits.

States are float32, and so is every sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import silu

from kernels.contract import Run, Singles, States

# Wide enough for whole tiles of a product, narrow enough that the system is small beside it.
PART = 64


def plan_runs(pool: torch.Tensor, runs: Sequence[Run]) -> States:
    """Say which runs of a step are computed side by side, and which one after another."""
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
    """Return [T, H, C] SiLU of each channel's weighted sum over a token and those before it.

    Args:
        x: [T, H, C] float32.
        weight: [H, C, W], the token's own last.
        memory: [slots, H, C, W - 1], what was before; a view of the pool, which is written to.
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
    """Return [T, H, R, V] what queries find; R matrices share a query and a key.

    Args:
        query: [T, H, K] float32; `key` likewise.
        value: [T, H, R, V].
        decay: [T, H, R], at most 0; `beta` likewise, 0 to 1.
        memory: [slots, H, R, K, V]; a view of the pool, which is written to.
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
    """Return a copy of the states, nothing but zeros of those that are new."""
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
    """Return the results of one part's queries, and the state after it."""
    total = decay.cumsum(-1)
    left = total.exp()[..., None]  # of the matrix, after each token
    # What is left after token i of what token j added; nothing of what comes later.
    steps = total[..., :, None] - total[..., None, :]
    later = torch.ones_like(steps[0, 0], dtype=torch.bool).triu(1)
    left_of = steps.masked_fill(later, -torch.inf).exp()
    system = beta * (key @ key.mT) * left_of
    alone = beta * (value - left * (key @ matrix))
    missing = torch.linalg.solve_triangular(system, alone, upper=False, unitriangular=True)
    found = left * (query @ matrix) + ((query @ key.mT) * left_of) @ missing
    kept = key * left_of[..., -1, :, None]
    return found, left[..., -1:, :] * matrix + kept.mT @ missing
