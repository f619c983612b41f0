"""Loads safetensors files directly into a model's tensors.

Each checkpoint tensor, or the part that a shard needs, is copied into the rows of its target, which
may have another dtype, so the model is never in memory twice.  A checkpoint must contain every
tensor and no unknown one, because a model with a missing part would generate noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open

from wire.process.log_limit import ProgressLine
from wire.process.model import ModelError, checkpoint_files
from worker.model.config import read_config
from worker.model.mxfp4 import BLOCK, BLOCKS, SCALES, widen_into
from worker.model.shard import WHOLE, Cut, Shard
from worker.model.weights import Tensors, Weights

log = structlog.get_logger("worker")

# The name that `_text_name` returns for tensors that do not belong to the text part.
_NO_TEXT = ""
# The prefix of multi-token prediction tensors, which are not loaded.
_AHEAD = "mtp."


def load_weights(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    kv_dtype: torch.dtype | None = None,
    shard: Shard = WHOLE,
) -> Weights:
    """Load the tensors of a model directory, or a shard's part of them.

    Args:
        dtype: The dtype to store matrices in; None for the checkpoint's.
        kv_dtype: The dtype of keys and values; None for `dtype`.

    Raises:
        ModelError: The model cannot be served; the message names the file and the key or tensor.
    """
    config = read_config(path)
    dtype = dtype or getattr(torch, config.dtype)
    weights = Weights(config, dtype, device, kv_dtype, shard)
    missing = weights.named_tensors()
    # Some checkpoints with tied embeddings also store the output head.
    ignored = {"lm_head.weight", _NO_TEXT} if config.tied_embeddings else {_NO_TEXT}
    if not shard.is_whole:
        whole = Weights(config, dtype, torch.device("meta")).named_tensors()
        ignored |= whole.keys() - missing.keys()
    cuts = {name: shard.cut(config, name) for name in missing}
    line = ProgressLine(log.info, "loading weights")
    loading = _Loading(missing, cuts, ignored, config.is_multimodal, len(missing), line)
    for file in checkpoint_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                loading.load(tensors)
        except (SafetensorError, ValueError) as error:
            raise ModelError(f"{file}: {error}") from error
    if missing:
        raise ModelError(f"{path}: the checkpoint lacks {_some(missing)}")
    weights.finish_loading()
    return weights


@dataclass
class _Loading:
    """Fills tensors from one file after another, and removes them from `missing`.

    An MXFP4 matrix is stored as two tensors, blocks and scales.  `halves` has those whose
    counterpart has not been found yet.
    """

    missing: Tensors
    cuts: dict[str, Cut | None]
    ignored: set[str]
    is_multimodal: bool
    num_tensors: int
    line: ProgressLine
    halves: Tensors = field(default_factory=Tensors)

    def load(self, tensors: Any) -> None:
        """Load the tensors of an open file.

        Raises:
            ValueError: A tensor is unknown, repeated, or has a wrong shape or dtype.
        """
        stored = {_text_name(it) if self.is_multimodal else it: it for it in tensors.keys()}
        wanted = {it for it in stored if not self.ignored & {it, _matrix_of(it)}}
        names = {it for it in wanted if not it.startswith(_AHEAD)}
        for name in sorted(names - self.missing.keys()):
            if (matrix := _matrix_of(name)) in self.missing:
                self._log_progress()
                source = tensors.get_slice(stored[name])
                self.halves[name] = _read_half(source, self.cuts[matrix], stored[name])
                self._widen(matrix)
                names.discard(name)
        extra = {stored[it] for it in names - self.missing.keys() if not it.endswith(".inv_freq")}
        if extra:
            raise ValueError(f"unknown (or repeated) tensors {_some(extra)}")
        for name in names & self.missing.keys():
            self._log_progress()
            target, cut = self.missing.pop(name), self.cuts[name]
            if cut is None:
                _fill(target, tensors.get_tensor(stored[name]), stored[name])
            else:
                _fill_part(target, cut, tensors.get_slice(stored[name]), stored[name])

    def _log_progress(self) -> None:
        self.line.at(self.num_tensors - len(self.missing), self.num_tensors)

    def _widen(self, name: str) -> None:
        """Dequantize an MXFP4 matrix into its target if both halves have been found."""
        if name + BLOCKS in self.halves and name + SCALES in self.halves:
            # MXFP4 matrices are not transposed, unlike stacked experts of other dtypes.
            target, cut = self.missing.pop(name).transpose(1, 2), self.cuts[name]
            skipped = cut.kept.start % BLOCK if cut is not None and cut.dim == -2 else 0
            blocks, scales = self.halves.pop(name + BLOCKS), self.halves.pop(name + SCALES)
            try:
                widen_into(target, blocks, scales, skipped=skipped)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error


def _matrix_of(name: str) -> str:
    """Return the name of the matrix, given that of its blocks or scales or its own."""
    return name.removesuffix(BLOCKS).removesuffix(SCALES)


def _text_name(name: str) -> str:
    """Convert a tensor's name in a multimodal checkpoint to its name in a text-only checkpoint.

    Checkpoints of transformers 5 have the prefix "model.", older ones do not.
    """
    part = name.removeprefix("model.")
    if part.startswith(("vision_tower.", "multi_modal_projector.")):
        return _NO_TEXT
    if part.startswith("language_model."):
        part = part.removeprefix("language_model.")
        return part if part.startswith(("model.", "lm_head.")) else f"model.{part}"
    return name


def _read_half(source: Any, cut: Cut | None, name: str) -> torch.Tensor:
    """Read the MXFP4 blocks, or their scales, that contain a shard's part of a matrix."""
    if cut is None:
        return torch.as_tensor(source[:])
    dim, kept, length, _ = cut
    if dim == -1:  # the outputs, which are the rows in MXFP4
        return _read_part(source, 1, kept, length, name)
    groups = range(kept.start // BLOCK, -(-kept.stop // BLOCK))
    return _read_part(source, 2, groups, -(-length // BLOCK), name)


def _read_part(source: Any, dim: int, kept: range, length: int, name: str) -> torch.Tensor:
    """Read the indices `kept` of dimension `dim` of a tensor; that dimension must be `length`."""
    shape = source.get_shape()
    if len(shape) <= dim or shape[dim] != length:
        raise ValueError(
            f"{name} is {tuple(shape)}, config.json asks for {length} in dimension {dim}"
        )
    return torch.as_tensor(source[(slice(None),) * dim + (slice(kept.start, kept.stop),)])


def _fill(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    if source.shape != target.shape:
        raise ValueError(
            f"{name} is {tuple(source.shape)}, config.json asks for {tuple(target.shape)}"
        )
    if not source.is_floating_point() or source.itemsize == 1:
        raise ValueError(f"{name} is {source.dtype}; quantized tensors are not supported")
    target.copy_(source)


def _fill_part(target: torch.Tensor, cut: Cut, source: Any, name: str) -> None:
    """Fill `target` with a shard's part of a tensor, reading only that part; zero the padding."""
    dim, kept, length, further = cut
    dim += target.dim()
    start = 0
    for indices in (kept, *further):
        part = _read_part(source, dim, indices, length, name)
        _fill(target.narrow(dim, start, len(indices)), part, name)
        start += len(indices)
    target.narrow(dim, start, target.shape[dim] - start).zero_()


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:5])
    return f"{shown} and {len(ordered) - 5} more" if len(ordered) > 5 else shown
