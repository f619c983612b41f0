"""Shards of a model compute the tokens of the whole model, in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import PagedBatch
from scripts.models.make_model import make_model
from tests.worker.compute.processes import CPU, Processes
from tests.worker.paged import Text, batch_of, with_windows
from worker.compute.compiled import CompiledTransformer
from worker.compute.model import Model, load_model
from worker.compute.ranks import Ranks

CASES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3, "vocab_size": 255},
    "llama-biases-one-kv-head": {
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {"num_hidden_layers": 4},
    "qwen3_moe-some-layers": {"num_hidden_layers": 4},
    "gpt_oss-one-kv-head": {"num_key_value_heads": 1, "num_local_experts": 3},
}
# Shards and stages; with four shards two have the same head of keys and values.
GRIDS = {"llama": [(2, 2), (4, 1)], "gpt_oss-one-kv-head": [(2, 1), (1, 2)]}
BLOCK_SIZE, NUM_TOKENS = 8, 14
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 200, 254, 128], [127, 2, 7]]


def greedy(model: Model, ranks: Ranks | None) -> list[list[int]]:
    """Read the prompts, the first in two chunks, and generate in one batch."""
    config = model.config
    pool = torch.zeros(12, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    window_pool = torch.zeros_like(pool)
    texts = [Text([*prompt], [*range(i, 12, 2)]) for i, prompt in enumerate(PROMPTS)]
    counts = [10, len(PROMPTS[1])]
    for _ in range(NUM_TOKENS):
        batch = batch_of([*zip(texts, counts, strict=True)], BLOCK_SIZE)
        paged = PagedBatch(
            slots=torch.from_numpy(batch.slots),
            query_starts=torch.from_numpy(batch.query_starts),
            context_lens=torch.from_numpy(batch.context_lens),
            block_tables=torch.from_numpy(batch.block_tables),
        )
        token_ids, positions, rows = map(
            torch.from_numpy, (batch.token_ids, batch.positions, batch.sample_rows)
        )
        paged = with_windows(paged, window_pool)
        chosen = model.forward(token_ids, positions, pool, paged, rows).argmax(-1).int()
        if ranks is not None:
            chosen = chosen if len(chosen) else torch.empty(len(rows), dtype=torch.int32)
            ranks.broadcast(chosen)
        found = iter(chosen.tolist())
        for text, count in zip(texts, counts, strict=True):
            text.computed += count
            if text.computed == len(text.token_ids):
                text.token_ids.append(next(found))
        counts = [len(text.token_ids) - text.computed for text in texts]
    return [text.token_ids for text in texts]


def generate(ranks: Ranks, path: Path, is_compiled: bool) -> tuple[list[list[int]], int]:
    model = load_model(path, torch.float32, CPU, compiled=is_compiled, ranks=ranks)
    assert isinstance(model, CompiledTransformer) == is_compiled
    return greedy(model, ranks), model.parameter_bytes


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_equals_one_process(
    name: str, is_compiled: bool, processes: Processes, tmp_path: Path
) -> None:
    path = make_model(tmp_path, family=name.partition("-")[0], **CASES[name])
    whole = load_model(path, torch.float32, CPU, compiled=is_compiled)
    wanted = greedy(whole, None)
    assert len(set(wanted[0][len(PROMPTS[0]) :])) > 3  # not one token again and again
    for size, stages in GRIDS.get(name, [(2, 2)]):
        for tokens, num_bytes in processes.run(size, stages, generate, path, is_compiled):
            assert tokens == wanted, (size, stages)
            assert num_bytes < whole.parameter_bytes


def read(model: Model, prompt: list[int]) -> torch.Tensor:
    """Return the logits of every token of a prompt."""
    count, config = len(prompt), model.config
    num_blocks = -(-count // BLOCK_SIZE)
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    positions = torch.arange(count, dtype=torch.int32)
    batch = PagedBatch(
        slots=positions,
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
    )
    pool = torch.zeros(shape, dtype=model.kv_dtype)
    token_ids = torch.tensor(prompt, dtype=torch.int32)
    batch = with_windows(batch, torch.zeros_like(pool))
    return model.forward(token_ids, positions, pool, batch, positions).clone()


def read_part(ranks: Ranks, path: Path, settings: dict[str, Any]) -> torch.Tensor:
    model = load_model(path, torch.bfloat16, CPU, compiled=True, ranks=ranks, **settings)
    return read(model, PROMPTS[0])


@pytest.mark.parametrize("settings", [{}, {"in_int8": True}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_rounded_products_are_near_those_of_one_process(
    family: str, settings: dict[str, Any], processes: Processes, tmp_path: Path
) -> None:
    path = make_model(tmp_path, family=family, dtype="bfloat16", tie_word_embeddings=True)
    whole = load_model(path, torch.bfloat16, CPU, compiled=True, **settings)
    wanted = read(whole, PROMPTS[0])
    found, *nothing = processes.run(2, 2, read_part, path, settings)
    assert (found - wanted).norm() < 0.04 * wanted.norm()
    assert [it.shape for it in nothing] == [(0, 256)] * 3


def read_ahead(ranks: Ranks, path: Path, is_compiled: bool) -> None:
    load, prompts = partial(load_model, path, torch.float32, CPU, compiled=is_compiled), range(2)
    part = load(ranks=ranks)
    wanted = []
    if ranks.shard.is_last:
        # Meanwhile the first stage hands on what it makes of one prompt, and computes the next.
        whole = load()
        wanted = [read(whole, [token] * 200) for token in prompts]
    found = [read(part, [token] * 200) for token in prompts]
    torch.testing.assert_close(found[: len(wanted)], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_stage_goes_on_before_the_next_has_read_all(
    is_compiled: bool, processes: Processes, tmp_path: Path
) -> None:
    # So wide that what is handed on does not all fit into a socket at once.
    path = make_model(tmp_path, hidden_size=4096, head_dim=16, intermediate_size=32)
    processes.run(1, 2, read_ahead, path, is_compiled)


def describe(ranks: Ranks, path: Path) -> str:
    return load_model(path, torch.bfloat16, CPU, compiled=True, ranks=ranks).arithmetic


def test_all_stages_compute_alike_whatever_layers_they_have(
    processes: Processes, tmp_path: Path
) -> None:
    """The first layer, one of 129 columns, is none for compiled loops; the second could be."""
    shape: dict[str, Any] = {
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "intermediate_size": 129,
    }
    path = make_model(tmp_path, family="qwen3_moe", dtype="bfloat16", **shape)
    last, first = processes.run(1, 2, describe, path)
    assert last == first
