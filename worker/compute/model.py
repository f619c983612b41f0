"""Loads a model with the forward pass that fits it and the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from kernels.cpu.linear_int8 import MAX_INPUTS
from kernels.cpu.simd import PANEL
from wire.process.model import ModelError
from worker.compute.compiled import CompiledTransformer
from worker.compute.ranks import Ranks
from worker.compute.sharded import ShardedTransformer
from worker.compute.transformer import Transformer
from worker.model.config import read_config
from worker.model.loader import load_weights
from worker.model.shard import WHOLE
from worker.model.weights import Weights

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
        dtype: The dtype of computation; None is the checkpoint's.
        kv_dtype: The dtype of keys and values; None is `dtype`.
        compiled: For the CPU: use compiled loops, or torch in float32 for shapes that have none.
            The default dtype is then the processor's fastest.  In float32 the matrices of a 16-bit
            checkpoint stay in 16 bits and are widened as they are read.
        in_int8: Round the matrices to 8 bits, from the checkpoint's own dtype; compiled only.
        ranks: The processes that compute it together; None for one.

    Raises:
        ModelError: The directory cannot be served; names the file and the key or tensor.
    """
    shard = WHOLE if ranks is None else ranks.shard
    if not compiled:
        return _by_torch(load_weights(path, dtype, device, kv_dtype=kv_dtype, shard=shard), ranks)
    # With the layers of all stages, so that all of them decide alike.
    config = replace(shard, stage=0, stages=1).of(read_config(path))
    dtype = dtype or CompiledTransformer.best_dtype(config)
    if in_int8 and not CompiledTransformer.knows(config):
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
    return _by_torch(weights, ranks)


def _by_torch(weights: Weights, ranks: Ranks | None) -> Transformer:
    return Transformer(weights) if ranks is None else ShardedTransformer(weights, ranks)
