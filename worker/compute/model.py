"""Loads a model, and selects the forward pass that supports it on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from kernels.cpu.linear_int8 import MAX_INPUTS
from kernels.cpu.simd import PANEL
from wire.process.model import ModelError
from worker.compute.compiled import CompiledTransformer
from worker.compute.ranks import Ranks
from worker.compute.transformer import Transformer
from worker.model.config import read_config
from worker.model.loader import load_weights
from worker.model.shard import WHOLE

Model = Transformer | CompiledTransformer


def load_model(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    kv_dtype: torch.dtype | None = None,
    compiled: bool = False,
    in_int8: bool = False,
    ranks: Ranks | None = None,
) -> Model:
    """Load a model directory.

    Args:
        dtype: The dtype of computation; None for the checkpoint's.
        kv_dtype: The dtype of keys and values; None for `dtype`.
        compiled: Use the compiled CPU loops, or torch in float32 if they do not support the model.
            `dtype` None is then the processor's fastest dtype.  With float32, the matrices of a
            16-bit checkpoint stay in 16 bits and are converted when the loops read them.
        in_int8: Quantize the matrices to int8 from the checkpoint's dtype; compiled only.
        ranks: The processes that compute the model together; None for a single process.

    Raises:
        ModelError: The model cannot be served; the message names the file and the key or tensor.
    """
    shard = WHOLE if ranks is None else ranks.shard
    if not compiled:
        weights = load_weights(path, dtype, device, kv_dtype=kv_dtype, shard=shard)
        return Transformer(weights, ranks)
    # Use the layers of all pipeline stages, so that all processes choose the same forward pass.
    config = replace(shard, stage=0, stages=1).of(read_config(path))
    dtype = dtype or CompiledTransformer.best_dtype(config)
    if in_int8 and not CompiledTransformer.supports_layers(config):
        raise ModelError(
            f"{path / 'config.json'}: weights cannot be int8: layers of {config.family} have what "
            "there are no loops for; leave --weights out"
        )
    if in_int8 and not CompiledTransformer.fits(config, dtype, in_int8=True):
        sizes = " or ".join(map(str, sorted(config.intermediate_sizes)))
        raise ModelError(
            f"{path / 'config.json'}: weights cannot be int8: that takes hidden_size, "
            f"intermediate_size and head_dim in multiples of {PANEL} and at most {MAX_INPUTS}, "
            f"these are {config.hidden_size}, {sizes} and {config.head_dim}; "
            "leave --weights out"
        )
    kept = None if in_int8 or dtype is torch.float32 else dtype
    weights = load_weights(path, kept, device, kv_dtype=kv_dtype or dtype, shard=shard)
    fits = CompiledTransformer.fits(config, dtype, weights.weight_dtype, weights.kv_dtype)
    if fits:
        return CompiledTransformer(weights, dtype, in_int8=in_int8, ranks=ranks)
    weights.widen()
    return Transformer(weights, ranks)
