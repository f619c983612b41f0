"""Checkpoints in safetensors files, whole or sharded, into a transformer's memory.

Each tensor is read straight into the rows it belongs in, converting its dtype, so a model is never
held twice.  A checkpoint has to fill every tensor and hold no other: a silent mismatch would serve
noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from wire.checkpoint import ModelError, checkpoint_files
from worker.model.config import read_config
from worker.model.ops import Tensors
from worker.model.transformer import Transformer


def load_model(
    path: Path, dtype: torch.dtype | None, device: torch.device, *, compiled: bool = False
) -> Transformer:
    """Load a model directory; `dtype` None keeps the checkpoint's.

    `compiled` is for the CPU's compiled loops: a float32 model keeps the matrices of a 16-bit
    checkpoint in 16 bits, widened as they are read, so nothing but memory and time changes.

    Raises:
        ModelError: The directory cannot be served; names the file and the key or tensor.
    """
    config = read_config(path)
    stored: torch.dtype = getattr(torch, config.dtype)
    dtype = dtype or stored
    is_kept = compiled and dtype is torch.float32
    model = Transformer(config, dtype, device, stored if is_kept else dtype)
    missing = model.named_tensors()
    ignored = _ignored(model)
    for file in checkpoint_files(path):
        _load_file(file, missing, ignored)
    if missing:
        raise ModelError(f"{path}: the checkpoint lacks {_some(missing)}")
    model.finish_loading()
    if compiled:
        model.compile()
    return model


def _load_file(file: Path, missing: Tensors, ignored: frozenset[str]) -> None:
    """Fill what one file holds and strike it from `missing`."""
    try:
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys()) - ignored
            extra = {name for name in names - missing.keys() if not name.endswith(".inv_freq")}
            if extra:
                raise ModelError(f"{file}: unknown (or repeated) tensors {_some(extra)}")
            for name in names & missing.keys():
                _fill(missing.pop(name), tensors.get_tensor(name), file, name)
    except SafetensorError as error:
        raise ModelError(f"{file}: {error}") from error


def _fill(target: torch.Tensor, source: torch.Tensor, file: Path, name: str) -> None:
    if source.shape != target.shape:
        raise ModelError(
            f"{file}: {name} is {tuple(source.shape)}, config.json asks for {tuple(target.shape)}"
        )
    if not source.is_floating_point() or source.itemsize == 1:
        raise ModelError(f"{file}: {name} is {source.dtype}; quantized tensors are not supported")
    target.copy_(source)


def _ignored(model: Transformer) -> frozenset[str]:
    # Some checkpoints with tied embeddings store the output matrix as well.
    return frozenset({"lm_head.weight"} if model.config.tied_embeddings else ())


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:5])
    return f"{shown} and {len(ordered) - 5} more" if len(ordered) > 5 else shown
