"""Reads safetensors files, whole or sharded, straight into a model's memory.

Each tensor, or what a shard keeps of it, is copied into the rows it belongs in, which may have
another dtype, so a model is never in memory twice.  A checkpoint has to fill every tensor and hold
no other: a model with a part missing would answer with noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from wire.process.model import ModelError, checkpoint_files
from worker.model.config import read_config
from worker.model.mxfp4 import BLOCK, BLOCKS, SCALES, widen_into
from worker.model.shard import WHOLE, Cut, Shard
from worker.model.weights import Tensors, Weights

# What all tensors are called that belong to no text.
_NO_TEXT = ""
# What they begin with that guess tokens further ahead.
_AHEAD = "mtp."


def load_weights(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    kv_dtype: torch.dtype | None = None,
    shard: Shard = WHOLE,
) -> Weights:
    """Load a shard's part of the tensors of a model directory.

    Args:
        dtype: What they are kept in; None is the checkpoint's.
        kv_dtype: What keys and values are kept in; None is `dtype`.

    Raises:
        ModelError: The directory cannot be served; names the file and the key or tensor.
    """
    config = read_config(path)
    dtype = dtype or getattr(torch, config.dtype)
    weights = Weights(config, dtype, device, kv_dtype, shard)
    missing, halves = weights.named_tensors(), Tensors()
    cuts = {name: shard.cut(config, name) for name in missing}
    # Some checkpoints with tied embeddings store the output matrix as well.
    ignored = {"lm_head.weight", _NO_TEXT} if config.tied_embeddings else {_NO_TEXT}
    if not shard.is_whole:
        whole = Weights(config, dtype, torch.device("meta")).named_tensors()
        ignored |= whole.keys() - missing.keys()
    for file in checkpoint_files(path):
        _load_file(file, missing, halves, cuts, ignored, is_multimodal=config.is_multimodal)
    if missing:
        raise ModelError(f"{path}: the checkpoint lacks {_some(missing)}")
    weights.finish_loading()
    return weights


def _load_file(
    file: Path,
    missing: Tensors,
    halves: Tensors,
    cuts: Mapping[str, Cut | None],
    ignored: Set[str],
    *,
    is_multimodal: bool,
) -> None:
    """Fill what one file holds and strike it from `missing`.

    Of a matrix of MXFP4 `halves` keeps what is found first: its blocks, or its scales.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            held = {_text_name(name) if is_multimodal else name: name for name in tensors.keys()}
            names = {
                it
                for it in held
                if not it.startswith(_AHEAD) and it not in ignored and _matrix_of(it) not in ignored
            }
            for name in sorted(names - missing.keys()):
                if (matrix := _matrix_of(name)) in missing:
                    source = tensors.get_slice(held[name])
                    halves[name] = _half(source, cuts[matrix], file, held[name])
                    _widen(matrix, missing, halves, cuts[matrix], file)
                    names.discard(name)
            extra = {held[it] for it in names - missing.keys() if not it.endswith(".inv_freq")}
            if extra:
                raise ModelError(f"{file}: unknown (or repeated) tensors {_some(extra)}")
            for name in names & missing.keys():
                target, cut = missing.pop(name), cuts[name]
                if cut is None:
                    _fill(target, tensors.get_tensor(held[name]), file, held[name])
                else:
                    _fill_part(target, cut, tensors.get_slice(held[name]), file, held[name])
    except SafetensorError as error:
        raise ModelError(f"{file}: {error}") from error


def _matrix_of(name: str) -> str:
    """Return the matrix whose blocks or scales a name is that of; else the name."""
    return name.removesuffix(BLOCKS).removesuffix(SCALES)


def _half(source: Any, cut: Cut | None, file: Path, name: str) -> torch.Tensor:
    """Read the blocks, or their scales, that hold what is kept of a matrix."""
    if cut is None:
        return torch.as_tensor(source[:])
    dim, kept, length, _ = cut
    if dim == -1:  # outputs, which are rows here
        return _part(source, 1, kept, length, file, name)
    groups = range(kept.start // BLOCK, -(-kept.stop // BLOCK))
    return _part(source, 2, groups, -(-length // BLOCK), file, name)


def _widen(name: str, missing: Tensors, halves: Tensors, cut: Cut | None, file: Path) -> None:
    """Fill a matrix of MXFP4 once both halves are there."""
    if name + BLOCKS in halves and name + SCALES in halves:
        # Its rows are those of the matrix, which the checkpoint's other dtypes have turned over.
        target = missing.pop(name).transpose(1, 2)
        skipped = cut.kept.start % BLOCK if cut is not None and cut.dim == -2 else 0
        blocks, scales = halves.pop(name + BLOCKS), halves.pop(name + SCALES)
        try:
            widen_into(target, blocks, scales, skipped=skipped)
        except ValueError as error:
            raise ModelError(f"{file}: {name}: {error}") from error


def _text_name(name: str) -> str:
    """Return what a checkpoint of text alone calls a tensor of a multimodal one.

    Some begin with "model.", as transformers 5 writes them, others do not.
    """
    part = name.removeprefix("model.")
    if part.startswith(("vision_tower.", "multi_modal_projector.")):
        return _NO_TEXT
    if part.startswith("language_model."):
        part = part.removeprefix("language_model.")
        return part if part.startswith(("model.", "lm_head.")) else f"model.{part}"
    return name


def _fill(target: torch.Tensor, source: torch.Tensor, file: Path, name: str) -> None:
    if source.shape != target.shape:
        raise ModelError(
            f"{file}: {name} is {tuple(source.shape)}, config.json asks for {tuple(target.shape)}"
        )
    if not source.is_floating_point() or source.itemsize == 1:
        raise ModelError(f"{file}: {name} is {source.dtype}; quantized tensors are not supported")
    target.copy_(source)


def _fill_part(target: torch.Tensor, cut: Cut, source: Any, file: Path, name: str) -> None:
    """Fill with a part of a tensor, of which no more is read; zero what is beyond its end."""
    dim, kept, length, further = cut
    dim += target.dim()
    start = 0
    for indices in (kept, *further):
        part = _part(source, dim, indices, length, file, name)
        _fill(target.narrow(dim, start, len(indices)), part, file, name)
        start += len(indices)
    target.narrow(dim, start, target.shape[dim] - start).zero_()


def _part(source: Any, dim: int, kept: range, length: int, file: Path, name: str) -> torch.Tensor:
    """Read these of the `length` indices that a dimension of a tensor has to have."""
    shape = source.get_shape()
    if len(shape) <= dim or shape[dim] != length:
        raise ModelError(
            f"{file}: {name} is {tuple(shape)}, config.json asks for {length} in dimension {dim}"
        )
    return torch.as_tensor(source[(slice(None),) * dim + (slice(kept.start, kept.stop),)])


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:5])
    return f"{shown} and {len(ordered) - 5} more" if len(ordered) > 5 else shown
