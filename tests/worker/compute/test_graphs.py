"""Recorded decode steps through the CUDA kernels on the CPU: padded, they give what plain ones do.

The recording is `tests.kernels.shim.recording`: it replays by address and keeps nothing alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import kernels
from kernels import PagedBatch
from kernels.contract import Scratch, Windowed
from kernels.cuda import backend as cuda
from kernels.cuda.launch import OnDevice
from scripts.models.make_model import make_model
from tests.kernels.instances import attention_kernels, kv_kernels, rowwise_kernels
from tests.kernels.shim.backend import GPU, Shim, why_not
from tests.kernels.shim.recording import CopiedUploads, FreedMemory, Recorder
from worker.compute import graphs
from worker.compute.graphs import DecodeGraphs
from worker.compute.kv_cache import TorchKVCache
from worker.compute.model import load_model
from worker.compute.transformer import Transformer
from worker.executor.torch import layout_of

BLOCK_SIZE, NUM_BLOCKS = 16, 150
CASES: dict[str, dict[str, Any]] = {
    "llama-float32": {},
    "gemma3_text-bfloat16": {"head_dim": 64, "sliding_window": 40},
}
LIMITS = {"float32": 1e-5, "bfloat16": 8e-2}


@pytest.fixture(autouse=True)
def device_memory() -> Iterator[None]:
    with CopiedUploads():
        yield


def shim_of(model: Transformer) -> Shim:
    """Return the kernels of a model, compiled for the CPU."""
    dtype = model.kv_dtype
    return Shim(
        {
            "attention": attention_kernels(dtype, model.config.head_dim),
            "kv": kv_kernels(dtype, dtype),
            "rowwise": rowwise_kernels(dtype),
        }
    )


def graphs_on_shim(
    model: Transformer, cache: TorchKVCache, monkeypatch: pytest.MonkeyPatch
) -> tuple[DecodeGraphs, Recorder]:
    """Return a model's graphs, and what records them."""
    shim = shim_of(model)
    monkeypatch.setattr(kernels, "backend_of", lambda _: shim)
    record = Recorder(shim)
    return DecodeGraphs(model, cache, max_model_len=1024, gpu=GPU, record=record), record


def batch_of(lens: list[int], seed: int) -> PagedBatch:
    """Sequences of some context in blocks of their own, one token each."""
    blocks = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)))
    width = -(-max(lens) // BLOCK_SIZE)
    tables = torch.zeros(len(lens), width, dtype=torch.int32)
    for row, length in zip(tables, lens, strict=True):
        for column in range(-(-length // BLOCK_SIZE)):
            row[column] = next(blocks)
    contexts = torch.tensor(lens, dtype=torch.int32)
    last = contexts - 1
    slots = tables[torch.arange(len(lens)), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    starts = torch.arange(len(lens) + 1, dtype=torch.int32)
    return PagedBatch(slots.int(), starts, contexts, tables)


def model_of(tmp_path: Path, name: str, **sizes: Any) -> Transformer:
    family, dtype = name.split("-")
    sizes = {"max_position_embeddings": 1024} | CASES.get(name, {}) | sizes
    path = make_model(tmp_path, family=family, **sizes)
    model = load_model(path, getattr(torch, dtype), torch.device("cpu"))
    assert isinstance(model, Transformer)
    return model


def make_cache(model: Transformer) -> TorchKVCache:
    """Return a cache of any numbers, of fewer blocks for layers with a window than for others."""
    layout = layout_of(model.config, model.kv_dtype)
    cpu, sizes = torch.device("cpu"), (NUM_BLOCKS, BLOCK_SIZE)
    cache = TorchKVCache(layout, *sizes, cpu, num_window_blocks=NUM_BLOCKS - 20, spare_blocks=1)
    for pool in cache.pools:
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
    return cache


def windowed(batch: PagedBatch, cache: TorchKVCache) -> PagedBatch:
    """Give the blocks of the last windows' tokens one beside them; the others have none."""
    if cache.window_pool is None:
        return batch
    blocks, window = cache.window_blocks, cache.layout.windows[0]
    for block in range(NUM_BLOCKS):
        if block in blocks:
            blocks.forget(block)
    for table, length in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
        for block in table[max(0, length - window) // BLOCK_SIZE : -(-length // BLOCK_SIZE)]:
            blocks.take(int(block))
    slots, tables = blocks.of_step(batch.slots.numpy(), batch.block_tables.numpy())
    there = replace(
        batch,
        slots=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        scratch=Scratch(),
    )
    return replace(batch, windowed=Windowed(cache.window_pool, there))


@pytest.mark.parametrize("name", list(CASES))
def test_a_padded_step_is_a_plain_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    model = model_of(tmp_path, name)
    cache, plain = (make_cache(model) for _ in range(2))
    recorded, record = graphs_on_shim(model, cache, monkeypatch)
    monkeypatch.setattr(cuda, "_started", {})
    limit = LIMITS[name.split("-")[1]]
    # Sizes 1, 4, 8; contexts at borders of blocks, and so long that their keys are split.
    for seed, lens in enumerate([[1], [700], [17, 900, 16], [5, 600, 1], [3, 40, 15, 800, 2, 33]]):
        batch = windowed(batch_of(lens, seed), cache)
        token_ids = torch.arange(len(lens), dtype=torch.int32) + seed
        assert DecodeGraphs.can_replay(torch.arange(len(lens)), batch)
        got = recorded.forward(token_ids, batch.context_lens - 1, batch)
        rows = torch.arange(len(lens))
        batch = windowed(batch_of(lens, seed), plain)
        want = model.forward(token_ids, batch.context_lens - 1, plain.pool, batch, rows)
        torch.testing.assert_close(got, want, rtol=limit, atol=limit)
        for pool, plain_pool in zip(cache.pools, plain.pools, strict=True):
            spared = pool[:-1], plain_pool[:-1]
            torch.testing.assert_close(*spared, rtol=limit, atol=limit)
    assert record.num_recorded == 3
    assert cuda.last_started(0) == "a graph of 8 sequences"
    for pool, plain_pool in zip(cache.pools, plain.pools, strict=True):
        assert not torch.equal(pool[-1], plain_pool[-1]), "what pads a step is written there"


def test_steps_are_recorded_before_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(graphs, "SIZES", (1, 2, 4))
    model = model_of(tmp_path, "llama-float32")
    cache = make_cache(model)
    recorded, record = graphs_on_shim(model, cache, monkeypatch)
    recorded.prepare()
    assert record.num_recorded == 3
    assert "done=3 of=3" in " ".join(capsys.readouterr().out.split())
    places = set()
    for count, size in ((1, 1), (2, 2), (3, 4), (4, 4)):
        batch = batch_of([*range(5, 5 + count)], 0)
        token_ids = torch.zeros(count, dtype=torch.int32)
        logits = recorded.forward(token_ids, batch.context_lens - 1, batch)
        assert cuda.last_started(0) == f"a graph of {size} sequences"
        places.add(logits.data_ptr())
        assert logits.isfinite().all()
    assert record.num_recorded == 3, "no request waits for a recording"
    assert len(places) == 1, "24 sizes with logits of their own would take gigabytes"


def replace_tensor(owner: Any, name: str) -> None:
    """Replace an attribute or an item by an equal tensor, and drop the old one."""
    if isinstance(owner, dict):
        owner[name] = owner[name].clone()
    else:
        setattr(owner, name, getattr(owner, name).clone())


def replace_inputs(step: Any) -> None:
    for name in ("_token_ids", "_positions"):  # one allocation
        replace_tensor(step, name)


def replace_upload(step: Any, plan: str, name: str) -> None:
    held = getattr(step, plan).batch.scratch.of(OnDevice)
    held.attending.clear()  # which keep it, too
    replace_tensor(held.tensors, name)


def replace_room(step: Any, plan: str, name: str) -> None:
    """Replace what the launches of a window, or of none, hold in `keep`."""
    rooms = vars(getattr(step, plan))["_rooms"]
    for window, room in rooms.items():
        again = rooms[window] = room._replace(**{name: getattr(room, name).clone()})
        held = getattr(step, plan).batch.scratch.of(OnDevice)
        held.attending.clear()
        for key in held.works:
            held.works[key] = [again] if key[0] == window else held.works[key]


FREED: dict[str, Callable[[Any], None]] = {
    "inputs": replace_inputs,
    "rotation": lambda step: replace_tensor(step._model, "_frequencies"),  # noqa: SLF001
    "weight": lambda step: replace_tensor(vars(step._model)["_weights"], "norm"),  # noqa: SLF001
}
for plan in ("_plan", "_window_plan"):
    for name in ("slots", "starts", "contexts", "tables"):
        FREED[f"{plan} {name}"] = partial(replace_upload, plan=plan, name=name)
    for name in ("items", "parts", "tickets"):
        FREED[f"{plan} {name}"] = partial(replace_room, plan=plan, name=name)


def test_memory_that_a_replay_reads_and_nobody_keeps_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor in turn is dropped by its owner."""
    if reason := why_not():
        pytest.skip(reason)
    model = model_of(tmp_path, "gemma3_text-bfloat16")
    batch = batch_of([600], 0)
    for name, drop in FREED.items():
        cache = make_cache(model)
        recorded, _ = graphs_on_shim(model, cache, monkeypatch)
        step = (torch.zeros(1, dtype=torch.int32), batch.context_lens - 1, windowed(batch, cache))
        recorded.forward(*step)
        (it,) = vars(recorded)["_recorded"].values()
        it.replay()
        drop(it.step)
        with pytest.raises(FreedMemory):
            it.replay()
            pytest.fail(f"{name} is not read by address")


class RecordingDevice:
    """Stands in for `torch.cuda`, whose recording needs a GPU: logs the order of all work."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda _: self.log.append("main waits for aside"))

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda _: self.log.append("aside waits for main"))

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        self.log.append(f"begin {name}")
        yield
        self.log.append(f"end {name}")

    def stream(self, _: Any) -> Any:
        return self._section("aside")

    def graph(self, _: Any, *, pool: str, capture_error_mode: str) -> Any:
        return self._section(f"graph in {pool}, errors of {capture_error_mode}")


def test_a_step_runs_once_on_another_stream_before_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = RecordingDevice()
    monkeypatch.setattr(torch, "cuda", device)
    step = cast("graphs.DecodeStep", lambda: device.log.append("step"))
    graphs.record_graph(step, "the pool")()
    in_thread = "graph in the pool, errors of thread_local"  # KV is copied meanwhile
    warm_up = ["aside waits for main", "begin aside", "step", "end aside", "main waits for aside"]
    assert device.log == [*warm_up, f"begin {in_thread}", "step", f"end {in_thread}", "replay"]


def test_steps_that_wait_for_what_experts_are_given_are_not_recorded(tmp_path: Path) -> None:
    model = model_of(tmp_path, "qwen3_moe-float32")
    assert graphs.graphs_of(model, make_cache(model), 1024) is None


def test_which_steps_can_be_replayed() -> None:
    three = batch_of([5, 6, 7], 0)
    rows = torch.arange(3)
    assert DecodeGraphs.can_replay(rows, three)
    assert not DecodeGraphs.can_replay(rows[:2], three), "one is not sampled"
    assert not DecodeGraphs.can_replay(rows.flip(0), three), "the first is scored, and comes last"
    chunk = PagedBatch(
        three.slots, torch.tensor([0, 3]), three.context_lens[:1], three.block_tables
    )
    assert not any(DecodeGraphs.can_replay(rows[:count], chunk) for count in (1, 3))
    most = graphs.SIZES[-1]
    ones = torch.ones(most + 1, dtype=torch.int32)
    too_many = PagedBatch(ones, ones, ones, ones[:, None])
    assert not DecodeGraphs.can_replay(torch.arange(most + 1), too_many)


def launched(tmp_path: Path, name: str, sizes: dict[str, Any], monkeypatch: Any) -> list[str]:
    """Return the kernels that one recorded step of a model starts."""
    model = model_of(tmp_path, name, **sizes)
    cache = make_cache(model)
    recorded, record = graphs_on_shim(model, cache, monkeypatch)
    # The real backend, for the shim's own looks at the margins of its results.
    monkeypatch.setattr(kernels, "backend_of", lambda _: cuda)
    monkeypatch.setattr(cuda, "start", lambda _, launches: record.shim.run(launches))
    monkeypatch.setattr(cuda, "gpu", lambda _: GPU)
    batch = windowed(batch_of([17, 900, 16], 0), cache)
    recorded.forward(torch.zeros(3, dtype=torch.int32), batch.context_lens - 1, batch)
    return record.launched


# Nine kernels a layer: four products, two norms with the residual, the gate, rotation, attention;
# Gemma norms what is added, too.  Seven beside them: embedding (Gemma scales it), angles,
# cosines, sines, the first norm, the head, its logits in float32.
@pytest.mark.parametrize(
    ("name", "sizes", "most"),
    [
        ("llama-bfloat16", {"attention_bias": True, "mlp_bias": True}, (9, 7)),
        ("qwen3-bfloat16", {}, (9, 7)),
        ("gemma3_text-bfloat16", {}, (11, 8)),
    ],
    ids=["llama with biases", "qwen3", "gemma3"],
)
def test_a_recorded_step_starts_few_kernels(
    name: str,
    sizes: dict[str, Any],
    most: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    sizes = {"head_dim": 64, "num_key_value_heads": 2} | sizes
    one, two = (
        launched(tmp_path / str(layers), name, sizes | {"num_hidden_layers": layers}, monkeypatch)
        for layers in (1, 2)
    )
    a_layer = len(two) - len(one)
    print(f"{name}: {a_layer} a layer, {len(one) - a_layer} beside them: {one}")  # noqa: T201
    assert a_layer <= most[0] and len(one) - a_layer <= most[1], one
