"""The executor for real models: a Hugging Face model directory on one torch device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch

from kernels import KernelError, PagedBatch, check_pool
from kernels.contract import Run, Scratch, Windowed
from kernels.cuda import backend as cuda
from kernels.delta_rule import plan_runs
from wire.errors import ErrorCode
from wire.layout import Group, KVGroup, KVLayout, StateGroup
from wire.options import Structure
from worker.compute.contract import KVCache
from worker.compute.device import find_device
from worker.compute.kv_cache import TorchKVCache
from worker.compute.model import Model, load_model
from worker.compute.pool_shape import layers_by_window
from worker.compute.ranks import Ranks
from worker.executor import sampler
from worker.executor.batch import Batch, rows_of
from worker.executor.contract import (
    Attention,
    Capabilities,
    MemoryRequirements,
    ModelInfo,
    SampledToken,
    SequenceFailed,
)
from worker.executor.grammars import Grammars
from worker.executor.structured_output import Structured
from worker.model.config import DTYPES, ModelConfig, ModelError, read_config

# Prompt tokens per step on a CPU beyond which a longer step takes no less time per token.
_ENOUGH_ON_CPU = 256

# A prompt of this length has more rows than a decode tile, for any number of heads.
_PROMPT_ON_GPU = 64


class Step(NamedTuple):
    """The input of `worker.compute.transformer.Transformer.forward`, in host memory.

    Pipeline stages may split it into `num_microbatches` (`worker.parallel.microbatches`).
    `runs` are its segments with recurrent states; `windowed` is for sliding-window layers.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    batch: PagedBatch
    num_microbatches: int = 1
    runs: Sequence[Run] = ()
    windowed: PagedBatch | None = None


class TorchExecutor:
    """Computes a transformer; implements `worker.executor.contract.Executor`."""

    def __init__(self, model: Model, info: ModelInfo, path: Path) -> None:
        self.info = info
        self._grammars = Grammars(path / "tokenizer.json", info.vocab_size, info.eos_token_ids)
        self.capabilities = _capabilities(model, info)
        self._model: Model | None = model
        self._cache: TorchKVCache | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        name: str,
        fingerprint: str = "",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        weights: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        ranks: Ranks | None = None,
    ) -> Self:
        """Load a Hugging Face model directory.

        Args:
            dtype: The dtype of the computation: "auto", float32, bfloat16 or float16.  On CUDA
                "auto" is the checkpoint's dtype.  On the CPU it is bfloat16 if the checkpoint has
                it and the processor supports it, else float32; float16 rounds the weights there
                but computes in float32.
            kv_dtype: The dtype of keys and values; "auto" for `dtype`.
            weights: "auto", or "int8" on the CPU to quantize the weight matrices to 8 bits.
            device: See `worker.compute.device.find_device`.
            max_model_len: The maximum sequence length in tokens; None for the model's own limit.
            ranks: The processes that share the model, each of which loads its shard.

        Raises:
            ModelError: The directory, a setting or the length is invalid or not supported.
        """
        torch_device = find_device(device)
        _check(torch_device, dtype, kv_dtype, weights)
        model = load_model(
            path,
            _dtype("dtype", dtype),
            torch_device,
            kv_dtype=_dtype("kv_dtype", kv_dtype),
            compiled=torch_device.type == "cpu",
            in_int8=weights == "int8",
            ranks=ranks,
        )
        config = read_config(path)
        limit = config.max_positions
        if max_model_len is not None and not 0 < max_model_len <= limit:
            raise ModelError(
                f"max_model_len is {max_model_len}, the model allows 1 to {limit} "
                "(max_position_embeddings); lower --max-model-len"
            )
        info = ModelInfo(
            name=name,
            fingerprint=fingerprint,
            vocab_size=config.vocab_size,
            max_model_len=max_model_len or limit,
            eos_token_ids=config.eos_token_ids,
            layout=layout_of(config, model.kv_dtype),
        )
        return cls(model, info, path)

    def allocate(
        self, num_blocks: int, block_size: int, num_states: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        """Create the paged KV cache that later batches use.

        Raises:
            ValueError: The device's kernels do not support this block size or these heads.
        """
        model = self._model
        assert model is not None, "allocate after shutdown"
        sizes = num_blocks, block_size, num_states, num_window_blocks
        self._cache = make_cache(model, self.info.layout, *sizes)
        return self._cache

    def prepare(self) -> int:
        """See `worker.executor.contract.Preparer`."""
        assert self._model is not None, "prepare after shutdown"
        return 2 if self._model.device.type == "cpu" else _PROMPT_ON_GPU

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch and write its KV.

        Returns:
            [R + Q, vocab] float32 logits of `sample_rows`, then of `score_rows`, on the device;
            valid until the next step.
        """
        assert self._cache is not None, "forward before allocate"
        self._grammars.start(batch.samplings)
        rows = batch.sample_rows
        if batch.scorings:
            rows = np.concatenate([rows, batch.score_rows])
        runs: list[Run] = []
        if self.info.layout.has_state:
            arrays = batch.query_starts, batch.context_lens, batch.block_tables
            runs = self._cache.state_slots.runs(*arrays)
        paged = PagedBatch(
            slots=torch.from_numpy(batch.slots),
            query_starts=torch.from_numpy(batch.query_starts),
            context_lens=torch.from_numpy(batch.context_lens),
            block_tables=torch.from_numpy(batch.block_tables),
        )
        windowed = None
        if self.info.layout.windows:
            slots, tables = self._cache.window_blocks.of_step(batch.slots, batch.block_tables)
            windowed = replace(
                paged,
                slots=torch.from_numpy(slots),
                block_tables=torch.from_numpy(tables),
                scratch=Scratch(),
            )
        step = Step(
            token_ids=torch.from_numpy(batch.token_ids),
            positions=torch.from_numpy(batch.positions),
            rows=torch.from_numpy(rows),
            batch=paged,
            runs=runs,
            windowed=windowed,
        )
        try:
            logits = self._compute(step)
            # Must come before any other thread may copy or free these blocks.
            self._cache.mark()
        except RuntimeError as error:
            self._note_started(error)
            raise
        return logits

    def _compute(self, step: Step) -> torch.Tensor:
        """Compute a step and return the logits of its `rows`."""
        assert self._model is not None and self._cache is not None
        batch = with_pools(self._cache, step)
        token_ids, positions, rows = (
            it.to(self._model.device) for it in (step.token_ids, step.positions, step.rows)
        )
        return self._model.forward(token_ids, positions, self._cache.pool, batch, rows)

    def sample(self, logits: torch.Tensor, batch: Batch) -> list[SampledToken]:
        """See `worker.executor.sampler.sample`."""
        logits = logits[: len(batch.sample_rows)]
        masks = self._grammars.take()
        if masks is not None and masks.failed is not None:
            raise _without_mask(batch, masks.failed)
        try:
            return sampler.sample(logits, batch.samplings, self.info.eos_token_ids, masks)
        except sampler.NoTokenLeft as error:
            index = batch.sequence_of(error.row)
            raise SequenceFailed(index, str(error), ErrorCode.INVALID_REQUEST) from None
        except RuntimeError as error:
            self._note_started(error)
            raise

    def _note_started(self, error: RuntimeError) -> None:
        """Add a note to the error that names the kernel that was started last."""
        assert self._model is not None
        if (name := cuda.last_started(self._model.device.index or 0)) is not None:
            error.add_note(f"{name} was started last")

    def structured(
        self, structure: Structure, prompt_len: int, tenant: int = 0, cache_salt: str = ""
    ) -> Structured:
        """See `worker.executor.grammars`."""
        return self._grammars.structured(structure, prompt_len, tenant, cache_salt)

    def score(self, logits: torch.Tensor, batch: Batch) -> list[bytes]:
        """See `worker.executor.sampler.score`."""
        return sampler.score(logits[len(batch.sample_rows) :], batch.scorings)

    def shutdown(self) -> None:
        """Free the weights and the KV cache."""
        self._model = None
        self._cache = None
        self._grammars.shutdown()


def with_pools(cache: TorchKVCache, step: Step) -> PagedBatch:
    """Return a step's batch with the pools of recurrent states and of window KV, if any."""
    batch = step.batch
    if cache.states is not None:
        batch = replace(batch, states=plan_runs(cache.states, step.runs))
    if cache.window_pool is not None and step.windowed is not None:
        batch = replace(batch, windowed=Windowed(cache.window_pool, step.windowed))
    return batch


def make_cache(
    model: Model,
    layout: KVLayout,
    num_blocks: int,
    block_size: int,
    num_states: int = 0,
    num_window_blocks: int = 0,
) -> TorchKVCache:
    """Create the KV cache for a model, or for one shard of it, on its device.

    Raises:
        ValueError: The device's kernels do not support this block size or these heads.
    """
    # Padding rows of a CUDA graph write their KV to a spare block.
    spare_blocks = 1 if model.device.type == "cuda" else 0
    cache = TorchKVCache(
        layout,
        num_blocks,
        block_size,
        model.device,
        num_states=num_states,
        num_window_blocks=num_window_blocks,
        spare_blocks=spare_blocks,
    )
    try:
        for pool in cache.pools:
            check_pool(pool)
    except KernelError as error:
        raise ValueError(f"device {model.device}: {error}; see --block-size") from error
    return cache


def _without_mask(batch: Batch, row: int) -> SequenceFailed:
    """Return the exception for the sequence of `row`, which cannot follow its structure."""
    found = next(it.sampling for it in rows_of(batch.samplings) if it.index == row)
    problem = found.structured.problem if found.structured is not None else None
    return SequenceFailed(batch.sequence_of(row), problem or "", ErrorCode.INVALID_REQUEST)


def _check(device: torch.device, dtype: str, kv_dtype: str, weights: str) -> None:
    """Raise ModelError for settings that are invalid or that the device does not support."""
    is_cpu = device.type == "cpu"
    if not is_cpu and kv_dtype not in ("auto", dtype):
        raise ModelError(f"kv_dtype is {kv_dtype!r}, on {device.type} it is that of dtype")
    if weights not in ("auto", "int8"):
        raise ModelError(f"weights is {weights!r}, not auto or int8")
    if weights == "int8" and not is_cpu:
        raise ModelError(
            f"weights is 'int8', on {device.type} they are what dtype says; leave --weights out, "
            "or compute with --device cpu"
        )


def layout_of(config: ModelConfig, kv_dtype: torch.dtype) -> KVLayout:
    """Return the KV layout of a model with this KV dtype."""
    groups: list[Group] = [
        KVGroup(
            num_layers=len(layers),
            num_kv_heads=config.num_kv_heads,
            key_dim=config.head_dim,
            value_dim=config.head_dim,
            dtype=str(kv_dtype).removeprefix("torch."),
            window=window,
        )
        for window, layers in layers_by_window(config.windows).items()
    ]
    states = config.delta_layers
    if states:
        heads = states[0]
        head_bytes = heads.state_size * torch.float32.itemsize
        groups.append(
            StateGroup(num_layers=len(states), num_heads=heads.num_heads, head_bytes=head_bytes)
        )
    return KVLayout(groups=tuple(groups))


def _capabilities(model: Model, info: ModelInfo) -> Capabilities:
    config = model.config
    kinds = {Attention.PAGED, Attention.of(config.num_heads, config.num_kv_heads)}
    if any(config.windows):
        kinds.add(Attention.SLIDING_WINDOW)
    if config.delta_layers:
        kinds.add(Attention.LINEAR)
    # Activations are largest where the residual, its norm, gate, up and their product coexist; with
    # experts, the input and output of each of a token's experts as well.
    hidden = config.hidden_size
    widths = [
        3 * config.intermediate_size
        if it.experts is None
        else it.experts.top_k * (2 * hidden + 3 * it.experts.intermediate_size)
        + 3 * it.experts.shared_size
        for it in config.layers
    ]
    # The input of a DeltaNet layer, convolved and split, is float32: as large as two 16-bit values.
    widths += [2 * 3 * it.num_heads * it.channels for it in config.delta_layers]
    width = 2 * hidden + max(widths)
    return Capabilities(
        memory=MemoryRequirements.of(
            info.layout,
            info.max_model_len,
            parameter_bytes=model.parameter_bytes,
            activation_bytes_per_token=width * model.dtype.itemsize,
        ),
        attention=frozenset(kinds),
        enough_tokens=_ENOUGH_ON_CPU if model.device.type == "cpu" else None,
        speculative=not info.layout.has_state,
        dtypes=tuple(DTYPES),
        devices=("cpu", "cuda"),
        arithmetic=model.arithmetic,
        num_threads=torch.get_num_threads(),
    )


def _dtype(setting: str, name: str) -> torch.dtype | None:
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ModelError(f"{setting} is {name!r}, not auto or one of {', '.join(DTYPES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
