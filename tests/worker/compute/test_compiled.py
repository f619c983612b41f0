"""The compiled forward pass against torch's of the same weights, and against itself."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.linear_int8 import MAX_INPUTS
from scripts.models.make_model import make_model
from tests.worker.paged import Text, advance
from worker.compute import compiled, model
from worker.compute.compiled import CompiledTransformer
from worker.compute.kv_cache import TorchKVCache
from worker.executor.torch import TorchExecutor
from worker.model import loader
from worker.model.config import read_config

BLOCK_SIZE, NUM_BLOCKS = 8, 40
CASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama-tied-wide": {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 64},
    "mistral": {"sliding_window": 12},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"head_dim": 32, "attention_bias": True},
    "qwen3_moe": {"head_dim": 32},
    "gpt_oss-moe": {"head_dim": 32, "swiglu_limit": 0.75},
    "qwen3_moe-only": {"num_experts": 21, "num_experts_per_tok": 8, "mlp_only_layers": None},
    "gemma3_text": {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
}


# A dtype for each case: every model in one of them, every dtype with three models.
ALTERNATING = [*zip(CASES, cycle(["float32", "bfloat16", "float16"]), strict=False)]


def model_of(name: str, path: Path, **shape: Any) -> Path:
    return make_model(path, family=name.partition("-")[0], **CASES[name] | shape)


def load(path: Path, dtype: str = "float32", **settings: Any) -> TorchExecutor:
    executor = TorchExecutor.load(path, name="random", device="cpu", dtype=dtype, **settings)
    executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    return executor


def texts(seed: int) -> list[Text]:
    """Three sequences of some length, each with a third of the blocks."""
    rng = random.Random(seed)
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [
        Text([rng.randrange(100) for _ in range(rng.randrange(1, 40))], blocks[i * 13 :][:13])
        for i in range(3)
    ]


def run(executor: TorchExecutor, seed: int) -> torch.Tensor:
    """Read prompts in chunks while others generate; return all logits."""
    rng = random.Random(seed)
    logits, running = [], texts(seed)
    for _ in range(12):
        some = rng.sample(running, rng.randrange(1, 4))
        left = [(text, len(text.token_ids) - text.computed) for text in some]
        chunks = [(text, rng.randrange(1, most + 1)) for text, most in left]
        logits.append(advance(executor, chunks, BLOCK_SIZE))
        for text in some:  # continue with the same tokens in case of a near tie
            if text.computed + 1 == len(text.token_ids):
                text.token_ids[-1] = rng.randrange(100)
    return torch.cat(logits)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load executors that do without compiled loops."""

    def load_plain(path: Path, dtype: str) -> TorchExecutor:
        with monkeypatch.context() as patch:
            patch.setattr(CompiledTransformer, "fits", lambda *_, **__: False)
            return load(path, dtype)

    return load_plain


@pytest.mark.parametrize(
    ("name", "dtype"), [*product(CASES, ["float32", "bfloat16"]), ("mistral", "float16")]
)
def test_logits_are_those_of_torch(name: str, dtype: str, plain: Any, tmp_path: Path) -> None:
    path = model_of(name, tmp_path)
    ours, theirs = load(path, dtype), plain(path, dtype)
    # A 16-bit cache may round a key the other way, where the last bit before it differs.
    limit = 1e-4 if dtype == "float32" else 2e-2
    got, want = run(ours, 0), run(theirs, 0)
    if dtype == "bfloat16":  # the inputs of products have 8 bits
        error = (got - want).square().mean(1).sort().values
        # Rounding may choose another expert for a token with a near tie.
        error = error[: len(error) * 9 // 10] if "moe" in name else error
        assert error.mean().sqrt() < 0.02 * want.square().mean().sqrt()
    else:
        torch.testing.assert_close(got, want, rtol=limit, atol=limit)


def test_a_dtype_says_what_products_are_of(tmp_path: Path) -> None:
    path = make_model(tmp_path, dtype="bfloat16")
    # The same weights and, as far as they are equal, the same keys and values.
    short, wide = (load(path, dtype, kv_dtype="bfloat16") for dtype in ("bfloat16", "float32"))
    got, want = run(short, 1), run(wide, 1)
    assert not torch.equal(got, want)
    assert (got - want).square().mean().sqrt() < 0.02 * want.square().mean().sqrt()


def test_programs_and_buffers_are_replaced_without_changing_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a step is larger than all before, when the cache of programs is full, or KV is new."""
    monkeypatch.setattr(compiled, "MAX_PROGRAMS", 3)
    path = make_model(tmp_path)
    executor, prompt = load(path), random.Random(0).choices(range(100), k=99)

    def read(executor: TorchExecutor, size: int) -> torch.Tensor:
        text = Text(prompt[:size], list(range(13)))
        logits: torch.Tensor = advance(executor, [(text, size)], BLOCK_SIZE)
        return logits

    want = dict[int, torch.Tensor]()
    for size in (5, 1, 40, 7, 99, 5, 40, 1):
        logits = read(executor, size)
        assert torch.equal(logits, want.setdefault(size, logits))
    executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    fresh = load(path)
    for size, logits in want.items():
        assert torch.equal(read(fresh, size), logits) and torch.equal(read(executor, size), logits)


def test_more_rows_than_any_step_before(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    executor = load(path)
    alone = advance(load(path), [(Text([7, 8, 9], [0, 1]), 3)], BLOCK_SIZE)
    for count in (1, 2, 3, 5, 4, 1):
        them = [Text([7, 8, 9], [2 * i, 2 * i + 1]) for i in range(count)]
        logits = advance(executor, [(text, 3) for text in them], BLOCK_SIZE)
        assert len(logits) == count
        assert all(torch.equal(row, alone[0]) for row in logits)


@pytest.mark.parametrize(("name", "dtype"), ALTERNATING)
def test_weights_in_8_bits_change_logits_by_little(name: str, dtype: str, tmp_path: Path) -> None:
    path = model_of(name, tmp_path)
    rounded, whole = load(path, dtype, weights="int8"), load(path, dtype)
    got, want = run(rounded, 0), run(whole, 0)
    assert not torch.equal(got, want)
    assert rounded.capabilities.arithmetic == f"{whole.capabilities.arithmetic} int8"
    assert (got - want).square().mean().sqrt() < 0.06 * want.square().mean().sqrt()


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_in_8_bits_take_half(is_tied: bool, tmp_path: Path) -> None:
    path = make_model(tmp_path, tie_word_embeddings=is_tied, vocab_size=4096, dtype="bfloat16")
    rounded, whole = (
        load(path, "bfloat16", weights=weights).capabilities.memory.parameter_bytes
        for weights in ("int8", "auto")
    )
    # Embeddings that no product reads are not rounded.
    share = 0.5 if is_tied else 0.75
    assert (share - 0.05) * whole < rounded < (share + 0.05) * whole


@pytest.mark.parametrize(
    ("name", "weights"), [*zip(CASES, cycle(["auto", "int8"]), strict=False), ("llama", "int8")]
)
def test_in_bfloat16_no_bit_depends_on_chunks_and_batches(
    name: str, weights: str, tmp_path: Path
) -> None:
    # Heads of other sizes than multiples of 32 have two orders, of which bfloat16 hides most.
    path = model_of(name, tmp_path, **{"head_dim": CASES[name].get("head_dim", 32)})
    prompt = random.Random(0).choices(range(100), k=99)
    executor = load(path, "bfloat16", weights=weights)

    def read(*chunks: int, beside: int = 0) -> torch.Tensor:
        executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
        text = Text(list(prompt), list(range(13)))
        for count in chunks:
            others = [
                Text(prompt[i:], list(range(13 * (i + 1), 13 * (i + 2)))) for i in range(beside)
            ]
            step = [(other, 7) for other in others] + [(text, count)]
            logits = advance(executor, step, BLOCK_SIZE)
        return logits  # type: ignore[no-any-return]

    want = read(99)
    assert torch.equal(read(*[1] * 99), want)
    assert torch.equal(read(40, 1, 17, 41), want)
    assert torch.equal(read(40, 59, beside=2), want)


def test_arithmetic_names_the_way_that_bfloat16_is_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path)
    wide = load(path).capabilities.arithmetic
    assert not wide.endswith(("vectors", "dots", "tiles"))
    for way in Way:
        monkeypatch.setattr(compiled, "best_way", lambda way=way: way)
        arithmetic = load(path, "bfloat16").capabilities.arithmetic
        assert arithmetic.endswith(f" bfloat16 {way.name.lower()}")


def test_kv_has_the_layout_of_torch(plain: Any, tmp_path: Path) -> None:
    path = model_of("gemma3_text", tmp_path)
    pools = []
    for executor in (load(path), plain(path, "float32")):
        cache = executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
        assert isinstance(cache, TorchKVCache)
        pools.append(cache.pools)
        run(executor, 0)
    torch.testing.assert_close(*pools, rtol=1e-4, atol=1e-4)
    assert len(set(read_config(path).windows)) > 1, "so that the order of layers is another"


def test_embeddings_are_scaled_by_a_number_of_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models were trained: in bfloat16 the root of 48 is 6.9375."""
    path = make_model(tmp_path, family="gemma3_text", hidden_size=48)
    exact, rounded = run(load(path), 0), run(load(path, "bfloat16"), 0)
    config = replace(read_config(path), embedding_scale=6.9375)
    for module in (loader, model):
        monkeypatch.setattr(module, "read_config", lambda _: config)
    assert not torch.equal(run(load(path), 0), exact)
    assert torch.equal(run(load(path, "bfloat16"), 0), rounded)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_heads"])
def test_no_matrix_in_8_bits_has_more_inputs_than_a_sum_has_room_for(
    field: str, tmp_path: Path
) -> None:
    config = read_config(make_model(tmp_path / "model", head_dim=16))
    whole = MAX_INPUTS // 16
    most = whole if field == "num_heads" else 16 * whole
    step = 1 if field == "num_heads" else 16
    for size, fits in ((most, True), (most + step, False)):
        sizes = {"hidden_size": 64, "intermediate_size": 64} | {field: size}
        wide = replace(config, **sizes)  # type: ignore[arg-type]
        assert CompiledTransformer.fits(wide, torch.float32, in_int8=True) is fits
