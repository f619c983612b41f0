"""Weights, activations and blocks fit together, or a sentence says what to change."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from wire.layout import KVGroup, KVLayout
from worker.config import Config
from worker.executor.contract import MemoryRequirements, blocks_of_window
from worker.memory import (
    GPU_OVERHEAD_BYTES,
    MAX_DEFAULT_BLOCKS,
    MAX_HOST_BYTES,
    MIN_HOST_BYTES,
    check_host_bytes,
    count_blocks,
    default_kv_cache_bytes,
    free_bytes,
)

MODEL = MemoryRequirements(
    parameter_bytes=5000, activation_bytes_per_token=10, kv_bytes_per_token=3
)
CONFIG = Config(max_ubatch_tokens=20)


def blocks_of(num_blocks: int = 0, kv_cache_bytes: int = 480, free: int | None = None) -> int:
    sizes = {"num_blocks": num_blocks, "kv_cache_bytes": kv_cache_bytes}
    return count_blocks(MODEL, CONFIG.model_copy(update=sizes), free)


def test_not_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--kv-cache-bytes is 47, .* 16 tokens takes 48; raise"):
        blocks_of(kv_cache_bytes=47)


@given(st.integers(0, 30), st.integers(48, 2000), st.integers(0, 3000))
def test_what_the_refusal_proposes_fits(num_blocks: int, kv_cache_bytes: int, free: int) -> None:
    try:
        blocks = blocks_of(num_blocks, kv_cache_bytes, free)
    except ValueError as error:
        setting = "--num-blocks" if num_blocks else "--kv-cache-bytes"
        proposed = int(str(error).split(f"lower {setting} to ")[1].split()[0])
        assert f"only {free} are free" in str(error) and "model's 5000" in str(error)
        if num_blocks and proposed:
            assert blocks_of(proposed, kv_cache_bytes, free) == proposed < num_blocks
        elif not num_blocks and proposed >= 48:
            assert proposed < kv_cache_bytes and blocks_of(0, proposed, free)
    else:
        assert 200 + blocks * 48 <= free


def test_states_take_as_much_as_blocks() -> None:
    model = MemoryRequirements(0, 0, kv_bytes_per_token=2, state_bytes=100)
    assert model.num_states(0, 16) == model.num_states(50, 16) == 16, "so many at least"
    assert model.num_states(100, 16) == 32 and model.cache_bytes(100, 16, 512) == 6400
    assert model.num_states(100, 1000) == 200, "two for each block"
    assert MODEL.num_states(1000, 16) == 0
    assert replace(model, window_bytes_per_token=3, window=9).num_states(100, 16) == 80
    assert model.blocks_in(6400, 16, 512) == 100 and model.blocks_in(6399, 16, 512) == 99
    assert (model + MODEL).state_bytes == 100
    with pytest.raises(ValueError, match="a block of 16 tokens with 16 states takes 1632; raise"):
        count_blocks(model, Config(kv_cache_bytes=1631, max_ubatch_tokens=1), None)
    with pytest.raises(ValueError, match=r"100 blocks with 32 states take 6400 .* to 99 at most"):
        count_blocks(model, Config(num_blocks=100, max_ubatch_tokens=1), 6399)


class Card:
    """A GPU, as torch tells of it, with the memory that workers on it have taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        self.total, self.taken = total, 0
        self._patch = partial(monkeypatch.setattr, torch.cuda)

    def kv_cache_bytes(
        self, share: float, weights: int, device: str = "auto", num_devices: int = 1
    ) -> int:
        """Load weights in a process of its own, and take what is the default for KV."""
        self.taken += weights + GPU_OVERHEAD_BYTES
        self._patch("memory_allocated", lambda: weights // 2)  # torch has cached the rest
        self._patch("memory_reserved", lambda: weights)
        self._patch("mem_get_info", lambda: (self.total - self.taken, self.total))
        sizes = {"device": device, "memory_share": share, "tensor_parallel": num_devices}
        kv_bytes = default_kv_cache_bytes(MODEL, CONFIG.model_copy(update=sizes), None)
        self.taken += 200 + kv_bytes
        return kv_bytes


def test_kv_takes_what_is_left_of_a_share_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 80 << 30)
    kept = card.kv_cache_bytes(0.9, 16 << 30)
    assert kept == int(0.9 * (80 << 30)) - (16 << 30) - GPU_OVERHEAD_BYTES - 200


def test_workers_of_one_gpu_take_no_more_than_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 80 << 30)
    first, second = (card.kv_cache_bytes(0.45, 16 << 30) for _ in range(2))
    assert first == second > 18 << 30, "the first leaves the second as much"
    assert card.taken <= 0.9 * card.total


def test_what_others_take_of_the_gpu_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 80 << 30)
    card.taken = 60 << 30  # by a program that is none of ours
    assert card.kv_cache_bytes(0.9, 16 << 30) == (80 - 60 - 16 << 30) - GPU_OVERHEAD_BYTES - 200
    with pytest.raises(ValueError, match=r"--memory-share is 0\.2, .* leaves 0 for KV.*raise it"):
        Card(monkeypatch, 80 << 30).kv_cache_bytes(0.2, 16 << 30)


def test_the_last_block_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    least = 100 + GPU_OVERHEAD_BYTES + 200 + 48  # weights, a step and a block
    assert Card(monkeypatch, least).kv_cache_bytes(1.0, 100) == 48
    with pytest.raises(ValueError, match="leaves 47 for KV, and a block takes 48"):
        Card(monkeypatch, least - 1).kv_cache_bytes(1.0, 100)


def test_several_gpus_have_as_much_each_and_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 80 << 30)
    kept = card.kv_cache_bytes(0.9, 16 << 30, num_devices=3)
    assert kept == 3 * (int(0.9 * (80 << 30)) - (16 << 30) - GPU_OVERHEAD_BYTES) - 200
    assert free_bytes("auto", num_devices=3) == 3 * (card.total - card.taken)


HOST = MemoryRequirements(0, 10, kv_bytes_per_token=1 << 12)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (None, MIN_HOST_BYTES),
        (1 << 30, MIN_HOST_BYTES),
        (24 << 30, 3 << 30),
        (1 << 40, MAX_HOST_BYTES),
    ],
)
def test_default_on_a_host_is_an_eighth_of_the_free_memory(free: int | None, expected: int) -> None:
    assert default_kv_cache_bytes(HOST, CONFIG, free) == expected
    assert count_blocks(HOST, CONFIG, free) == expected >> 16


def test_default_on_a_host_has_no_more_blocks_than_routers_track() -> None:
    toy = replace(HOST, kv_bytes_per_token=1 << 8)
    assert count_blocks(toy, CONFIG, 1 << 40) == MAX_DEFAULT_BLOCKS
    assert count_blocks(toy, CONFIG.model_copy(update={"kv_cache_bytes": 2 << 30}), None) == 1 << 19


def test_default_that_does_not_fit_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="only 200000000 are free; lower --kv-cache-bytes"):
        count_blocks(HOST, CONFIG, 200_000_000)


def test_gpu_without_a_model_counts_as_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 80 << 30)
    assert card.kv_cache_bytes(0.9, 0) == MIN_HOST_BYTES
    assert card.kv_cache_bytes(0.9, 16 << 30, "cpu") == MIN_HOST_BYTES


Needs = tuple[MemoryRequirements, MemoryRequirements]


def requirements(num_full: int, num_windowed: int, window: int, heads: int, dim: int) -> Needs:
    """Return what a model takes without its weights, kept apart by windows or not at all."""
    full = KVGroup(
        num_layers=num_full, num_kv_heads=heads, key_dim=dim, value_dim=dim, dtype="bfloat16"
    )
    windowed = structs.replace(full, num_layers=num_windowed, window=window)
    apart = MemoryRequirements.of(KVLayout(groups=(full, windowed)), 131_072)
    whole = structs.replace(full, num_layers=num_full + num_windowed)
    return apart, MemoryRequirements.of(KVLayout(groups=(whole,)), 131_072)


GEMMA_3_27B = (10, 52, 1024, 16, 128)


def test_how_many_blocks_layers_with_a_window_have() -> None:
    apart, whole = requirements(*GEMMA_3_27B)
    assert whole.num_window_blocks(10_000, 16, 512) == 0
    assert apart.expected_tokens == 8192 and blocks_of_window(1024, 16) == 66
    assert apart.num_window_blocks(51_200, 16, 512) == 100 * 66 + 32
    assert apart.num_window_blocks(2048, 16, 512) == 4 * 66 + 32, "of four sequences at least"
    assert apart.num_window_blocks(200, 16, 512) == 200, "never more than one for each block"
    short = MemoryRequirements.of(KVLayout(groups=(windowed_only(8192),)), 4096)
    assert short.expected_tokens == 4096, "no longer than the model allows"
    assert short.num_window_blocks(1000, 16, 512) == 1000
    assert (apart + whole).kv_bytes_per_token == apart.kv_bytes_per_token + whole.kv_bytes_per_token
    drafting = whole + apart
    assert drafting.kv_bytes_per_token == 2 * whole.kv_bytes_per_token, "a draft model keeps all"
    assert drafting.num_window_blocks(1000, 16, 512) == 0


def windowed_only(window: int) -> KVGroup:
    return KVGroup(
        num_layers=2, num_kv_heads=1, key_dim=8, value_dim=8, dtype="uint8", window=window
    )


def test_where_all_layers_have_a_window_blocks_are_numbers_only() -> None:
    memory = MemoryRequirements.of(KVLayout(groups=(windowed_only(64),)), 100_000)
    assert memory.kv_bytes_per_token == 0 and memory.window_bytes_per_token == 32
    num_blocks = memory.blocks_in(1 << 20, 16, 64)
    assert num_blocks > 5 * memory.num_window_blocks(num_blocks, 16, 64)
    assert memory.cache_bytes(num_blocks, 16, 64) <= 1 << 20


@pytest.mark.parametrize(("free", "fits"), [(None, True), (10_000, True), (1279, False)])
def test_host_memory_beside_the_cache_has_to_be_free(free: int | None, fits: bool) -> None:
    config = CONFIG.model_copy(update={"host_kv_bytes": 600})
    if fits:
        check_host_bytes(MODEL, config, 10, free)
    else:
        with pytest.raises(ValueError, match="1280 bytes are needed and 1279 are free"):
            check_host_bytes(MODEL, config, 10, free)
    check_host_bytes(MODEL, CONFIG.model_copy(update={"device": "cpu"}), 10, 10**6)
