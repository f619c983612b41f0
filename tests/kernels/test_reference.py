"""Conversions and draws of the reference; `test_operators` tests its other results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import SAMPLING, Rectangle, reference
from kernels.cpu import backend as cpu
from tests.kernels.draw_scenes import allowed_of


class CastsOfTorch211(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Conversions to fp8 as torch 2.11 makes them: what does not fit becomes NaN."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        done = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].dtype is torch.float8_e4m3fn:
            too_large = args[1].abs().float().expand(args[0].shape) > 448
            args[0].view(torch.uint8).masked_fill_(too_large, 0x7F)
        return done


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fp8_saturates_whatever_torch_makes_of_it(held: torch.dtype) -> None:
    pool = torch.zeros(2, 1, 2, 1, 8, 8, dtype=held)
    pool[1, 0, 0, 0, 0] = torch.tensor([1.0, 448, 449, 465, 6e4, -6e4, math.inf, math.nan])
    with CastsOfTorch211():  # type: ignore[no-untyped-call]
        sent = reference.pack_kv(
            pool, [1], Rectangle(range(1), range(pool.shape[3]), range(8)), torch.float8_e4m3fn
        )
    want = torch.tensor([1.0, 448, 448, 448, 448, -448, 448, math.nan])
    torch.testing.assert_close(sent[0, 0, 0, 0].float(), want, rtol=0, atol=0, equal_nan=True)


def test_tokens_are_sampled_as_on_the_cpu() -> None:
    vocab = 50
    draw = np.random.default_rng(7)
    rows = np.zeros(64, SAMPLING)
    rows["temperature"] = draw.choice([0.0, 0.7, 2.0], len(rows))
    rows["top_k"] = draw.choice([0, 1, 5, vocab, vocab + 1], len(rows))
    rows["top_p"] = draw.choice([0.3, 0.9, 1.0], len(rows))
    rows["min_p"] = draw.choice([0.0, 0.2], len(rows))
    rows["uniform"] = draw.random(len(rows))
    settings = torch.from_numpy(rows.view(np.int64).reshape(len(rows), -1))
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(7))
    for words in (None, allowed_of(len(rows), vocab, 7, 0.5)):
        drawn = reference.draw(logits, settings, words)
        assert drawn.tolist() == cpu.draw(logits, settings, words).tolist()
