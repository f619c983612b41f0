"""The torch executor: chunks, mixed batches, other blocks and other workers change no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.intrinsics import target_name
from kernels.cuda import backend as cuda
from kernels.cuda import staging
from scripts.models.make_model import make_model
from tests.kernels.shim.backend import why_not
from tests.kernels.shim.lane import CpuLane
from tests.kv import part, whole
from tests.worker.paged import Text, advance, batch_of
from wire.layout import KVGroup
from wire.options import Options
from worker.compute import compiled
from worker.compute.kv_cache import TorchKVCache
from worker.executor import sampler
from worker.executor import torch as torch_executor
from worker.executor.contract import Attention
from worker.executor.torch import TorchExecutor
from worker.model.config import ModelError

VOCAB = 256
SAMPLED = Options(temperature=0.9, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), eos_token_id=[5, 6])


def loaded(path: Path, **settings: Any) -> TorchExecutor:
    return TorchExecutor.load(path, name="tiny", fingerprint="abc", **{"device": "cpu"} | settings)


def kept_in(executor: Any) -> str:
    """The dtype of keys and values, kept and sent."""
    (group,) = executor.info.layout.groups
    assert isinstance(group, KVGroup)
    return group.dtype


def allocated(
    path: Path, block_size: int = 16, **settings: Any
) -> tuple[TorchExecutor, TorchKVCache]:
    executor = loaded(path, **settings)
    cache = executor.allocate(64, block_size)
    assert isinstance(cache, TorchKVCache)
    return executor, cache


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def text_of(
    length: int, *, seed: int = 0, block_size: int = 16, options: Options = SAMPLED
) -> Text:
    blocks = random.Random(seed).sample(range(64), -(-(length + 12) // block_size))
    return Text(prompt(length, seed), blocks, options=options, request_id=seed)


def alone(path: Path, text: Text, num_tokens: int = 8) -> list[int]:
    """Return what a text generates by itself, its prompt read at once."""
    executor, _ = allocated(path)
    same = text_of(text.prompt_len, seed=text.request_id, options=text.options)
    advance(executor, [(same, same.prompt_len)], 16)
    for _ in range(num_tokens - 1):
        advance(executor, [(same, 1)], 16)
    return same.token_ids[same.prompt_len :]


def test_info_says_what_is_served(path: Path) -> None:
    info = loaded(path).info
    assert (info.name, info.fingerprint, info.vocab_size) == ("tiny", "abc", VOCAB)
    assert (info.max_model_len, info.eos_token_ids) == (1024, frozenset({5, 6}))
    assert info.layout.token_bytes == 2 * 2 * 2 * 16 * 4
    assert loaded(path, max_model_len=100).info.max_model_len == 100


def test_capabilities_say_what_it_can_and_what_it_takes(path: Path) -> None:
    executor = loaded(path, dtype="float32")
    capabilities = executor.capabilities
    assert capabilities.attention == {Attention.PAGED, Attention.GROUPED_QUERY}
    assert capabilities.speculative and capabilities.continuous_batching
    assert capabilities.arithmetic == f"cpu {target_name()} float32"
    assert capabilities.num_threads == torch.get_num_threads()
    assert set(capabilities.devices) == {"cpu", "cuda"} and "bfloat16" in capabilities.dtypes
    memory = capabilities.memory
    assert memory.kv_bytes_per_token == executor.info.layout.token_bytes
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 0.95 * files < memory.parameter_bytes < files  # the files have headers
    assert memory.activation_bytes_per_token == (2 * 64 + 3 * 128) * 4
    half = loaded(path, dtype="bfloat16").capabilities.memory
    norms = 5 * 64 * 4  # of two layers and the last; they stay float32
    assert (half.parameter_bytes - norms) * 2 == memory.parameter_bytes - norms


def test_a_model_with_states_says_what_they_take(tmp_path: Path) -> None:
    model = make_model(tmp_path, family="qwen3_next")
    executor = TorchExecutor.load(model, name="tiny", device="cpu", dtype="float32")
    capabilities, layout = executor.capabilities, executor.info.layout
    assert Attention.LINEAR in capabilities.attention and not capabilities.speculative
    # Two layers of two heads: what a convolution of 4 sees, and two matrices of 8 by 12.
    assert capabilities.memory.state_bytes == 2 * 2 * 4 * ((8 + 8 + 24) * 3 + 2 * 8 * 12)
    assert layout.state_bytes == capabilities.memory.state_bytes
    assert layout.token_bytes == 2 * 2 * 2 * 16 * 4


def test_a_token_takes_room_at_each_of_its_experts(tmp_path: Path) -> None:
    executor = loaded(make_model(tmp_path, family="qwen3_moe"), dtype="float32")
    memory = executor.capabilities.memory  # 3 experts of 32, one layer without
    assert memory.activation_bytes_per_token == (2 * 64 + 3 * (2 * 64 + 3 * 32)) * 4


def test_a_window_on_some_layers_is_told(tmp_path: Path) -> None:
    executor = loaded(make_model(tmp_path, family="gemma3_text"))
    assert executor.info.layout.windows == (12,)
    assert Attention.SLIDING_WINDOW in executor.capabilities.attention


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_auto_is_what_the_processor_is_best_at(
    dtype: str, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path, dtype=dtype)
    monkeypatch.setattr(compiled, "best_way", lambda: way)
    best = "bfloat16" if dtype == "bfloat16" and way is not Way.VECTORS else "float32"
    assert kept_in(loaded(path, dtype="auto")) == best


def test_keys_and_values_may_be_kept_in_another_dtype(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    for dtype, kv_dtype in (("float32", "bfloat16"), ("bfloat16", "float32"), ("auto", "float16")):
        assert kept_in(loaded(path, dtype=dtype, kv_dtype=kv_dtype)) == kv_dtype


def test_kv_on_a_gpu_has_the_type_of_the_computation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_executor, "find_device", lambda _: torch.device("cuda"))
    with pytest.raises(ModelError, match="kv_dtype is 'float16', on cuda it is that of dtype"):
        loaded(path, dtype="bfloat16", kv_dtype="float16")


def test_weights_of_8_bits_are_the_cpus(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_executor, "find_device", lambda _: torch.device("cuda"))
    with pytest.raises(ModelError, match=r"weights is 'int8', on cuda .* leave --weights out"):
        loaded(path, weights="int8")


def test_a_model_without_whole_panels_has_no_weights_of_8_bits(tmp_path: Path) -> None:
    odd = make_model(tmp_path, intermediate_size=24)
    with pytest.raises(
        ModelError, match=r"config\.json: weights cannot be int8: .* these are .*24"
    ):
        loaded(odd, weights="int8")


def test_a_checkpoint_of_16_bits_takes_no_more_where_it_computes_in_float32(tmp_path: Path) -> None:
    path = make_model(tmp_path, dtype="bfloat16")
    short, wide = (loaded(path, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert wide.capabilities.memory.parameter_bytes == short.capabilities.memory.parameter_bytes
    assert kept_in(wide) == "float32"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_dtype": "int8"}, "kv_dtype is 'int8'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"weights": "int4"}, "weights is 'int4', not auto or int8"),
        ({"device": "tpu9"}, "device is 'tpu9'"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"device": "cuda:99"}, "device is 'cuda:99'"),
        ({"max_model_len": 1025}, "max_model_len is 1025"),
        ({"max_model_len": 0}, "max_model_len is 0"),
    ],
)
def test_settings_that_cannot_be_served_are_named(
    path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        loaded(path, **settings)


@pytest.mark.parametrize("chunks", [(1,) * 50, (16, 16, 16, 2), (7, 9, 1, 33)])
@pytest.mark.parametrize("block_size", [8, 32])
def test_chunks_and_block_sizes_change_no_token(
    path: Path, chunks: tuple[int, ...], block_size: int
) -> None:
    executor, _ = allocated(path, block_size)
    text = text_of(50, seed=1, block_size=block_size)
    for count in (*chunks, *(1,) * 7):
        advance(executor, [(text, count)], block_size)
    assert text.token_ids[50:] == alone(path, text)


def test_mixed_batches_change_no_token(path: Path) -> None:
    executor, _ = allocated(path)
    texts = [text_of(length, seed=length) for length in (1, 15, 16, 17, 40)]
    free = iter(random.Random(0).sample(range(64), 64))
    for text in texts:
        text.blocks = [next(free) for _ in text.blocks]
    # The last reads its prompt in pieces while the others join, generate and leave.
    first, second, third, fourth, last = texts
    advance(executor, [(first, 1), (second, 15), (last, 10)], 16)
    advance(executor, [(first, 1), (second, 1), (third, 16), (last, 5), (fourth, 3)], 16)
    advance(executor, [(fourth, 14), (third, 1), (second, 1), (first, 1)], 16)
    advance(executor, [(last, 25), (fourth, 1)], 16)
    for _ in range(4):
        advance(executor, [(text, 1) for text in texts], 16)
    for text in texts:
        generated = text.token_ids[text.prompt_len :]
        assert len(generated) >= 5
        assert generated == alone(path, text)[: len(generated)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_worker_goes_on_from_the_packed_kv(path: Path, dtype: str) -> None:
    sender, sent = allocated(path, 16, dtype=dtype)
    text = text_of(45, seed=2)
    advance(sender, [(text, 45)], 16)
    receiver, received = allocated(path, 8, dtype=dtype)
    copy = Text(list(text.token_ids), list(range(20, 30)), computed=45, options=text.options)
    copy.prompt_len = text.prompt_len
    for rectangle in (
        part(sent.layout, 0, 2, 0, 20),
        part(sent.layout, 0, 1, 20, 25),
        part(sent.layout, 1, 1, 20, 25),
    ):
        received.unpack(copy.blocks, rectangle, bytes(sent.pack(text.blocks, rectangle)))
    for _ in range(6):
        here = advance(sender, [(text, 1)], 16)
        there = advance(receiver, [(copy, 1)], 8)
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)
    assert copy.token_ids == text.token_ids


def test_16_bit_models_stay_near_the_float32_one(path: Path) -> None:
    want = advance(allocated(path)[0], [(text_of(30), 30)], 16)
    for dtype, tolerance in (("bfloat16", 0.15), ("float16", 0.02)):
        got = advance(allocated(path, dtype=dtype)[0], [(text_of(30), 30)], 16)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_copy_waits_for_the_step_that_was_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setattr(staging, "SIZES", (512, 2048))
    text = text_of(5)
    at_once, kept = allocated(path)
    at_once.forward(batch_of([(text, 5)], 16))
    executor, lane = loaded(path), CpuLane(dtype=torch.float32)
    cache = TorchKVCache(kept.layout, 64, 16, torch.device("cpu"), make_lane=lambda _: lane)
    vars(executor)["_cache"] = cache
    compute = vars(TorchExecutor)["_compute"]

    def later(step: object) -> torch.Tensor:
        lane.compute(lambda: compute(executor, step))
        return torch.empty(1, VOCAB)

    monkeypatch.setattr(executor, "_compute", later)
    executor.forward(batch_of([(text, 5)], 16))
    rectangle = whole(kept.layout, 0, 5)
    assert bytes(cache.pack(text.blocks, rectangle)) == bytes(kept.pack(text.blocks, rectangle))


@pytest.mark.parametrize("method", ["forward", "sample"])
def test_an_error_names_what_the_device_was_given_last(
    path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    executor, _ = allocated(path)
    batch = batch_of([(text_of(5), 5)], 16)
    logits = executor.forward(batch)
    monkeypatch.setattr(cuda, "_started", {0: "a graph of 4 sequences"})
    monkeypatch.setattr(executor, "_compute", fail)
    monkeypatch.setattr(sampler, "sample", fail)
    with pytest.raises(torch.AcceleratorError) as raised:
        executor.forward(batch) if method == "forward" else executor.sample(logits, batch)
    assert raised.value.__notes__ == ["a graph of 4 sequences was started last"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_runs_the_same_code(path: Path) -> None:
    texts = [text_of(30, seed=seed, options=Options()) for seed in (1, 2)]
    executor, cache = allocated(path, device="cuda", dtype="float32")
    for text in texts:
        advance(executor, [(text, 30)], 16)
        for _ in range(7):
            advance(executor, [(text, 1)], 16)
        assert text.token_ids[30:] == alone(path, text)
    packed = cache.pack(texts[1].blocks, whole(cache.layout, 3, 20))
    cache.unpack(texts[1].blocks, whole(cache.layout, 3, 20), bytes(packed))
    assert bytes(cache.pack(texts[1].blocks, whole(cache.layout, 3, 20))) == bytes(packed)
