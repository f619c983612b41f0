"""On real models of every family, chunks, swaps, transfers and drafts change no token.

In float32, and with weights in 8 bits and attention in bfloat16.
"""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.models.make_model import ARCHITECTURES, make_model
from tests.worker.engine.hashed import of_kind, run, text
from wire.options import Options
from wire.transfer import plan
from worker.compute.kv_cache import TorchKVCache
from worker.engine.draft_model import ModelDrafter
from worker.engine.engine import Engine
from worker.engine.outputs import Reserved, Started
from worker.engine.sequence import Sequence
from worker.engine.speculation import Drafter
from worker.engine.windows import table_of, unpack
from worker.executor.contract import blocks_of_window
from worker.executor.torch import TorchExecutor

# Windows on all layers, and on some of them, in the middle.
WINDOW = 7
WINDOWED = {
    "windows": {"family": "mistral", "sliding_window": WINDOW},
    "window between": {
        "family": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "compiled": {"family": "mistral", "head_dim": 32, "sliding_window": WINDOW},
}
GREEDY = Options(ignore_eos=True)
SAMPLED = Options(ignore_eos=True, temperature=0.7, top_p=0.95, seed=5)
NUM_TOKENS = 20


class Model:
    """A checkpoint, with executors that are loaded once."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self._loaded = list[TorchExecutor]()

    def executors(self, count: int) -> list[TorchExecutor]:
        """Return executors whose caches may be in use at the same time."""
        while len(self._loaded) < count:
            self._loaded.append(
                TorchExecutor.load(self._path, name="tiny", device="cpu", **self._settings)
            )
        return self._loaded[:count]


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *WINDOWED, "int8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "int8":
        path = make_model(directory, family="mistral", head_dim=32)
        return Model(path, {"dtype": "bfloat16", "weights": "int8"})
    shape = WINDOWED.get(request.param, {"family": request.param})
    return Model(make_model(directory, **shape), {"dtype": "float32"})


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prompts() -> dict[int, tuple[list[int], Options]]:
    draw = random.Random(3)
    words = [draw.choices(range(3, 256), k=4) for _ in range(3)]
    chosen = {}
    for request_id in range(4):
        prompt = [token for word in draw.choices(words, k=4) for token in word]
        chosen[request_id] = prompt, SAMPLED if request_id % 2 else GREEDY
    return chosen


def texts(model: Model, **settings: object) -> tuple[dict[int, list[int]], Engine]:
    settings = {"num_blocks": 128, "block_size": 4} | settings
    swap_always = bool(settings.get("swap_bytes"))
    engine = Engine(model.executors(1)[0], **settings)  # type: ignore[arg-type]
    assert isinstance(engine.cache, TorchKVCache)
    for pool in engine.cache.pools:  # nobody may read what nobody has written
        pool.fill_(math.nan)
    if swap_always:
        engine.swap.costs.copy_bytes_per_s = 1e15
    for request_id, (prompt, options) in prompts().items():
        engine.add(Sequence(request_id, prompt, options, NUM_TOKENS))
    outputs = run(engine)
    return {request_id: text(outputs, request_id) for request_id in prompts()}, engine


@pytest.fixture(scope="module")
def plain(model: Model) -> dict[int, list[int]]:
    return texts(model)[0]


def test_chunks(model: Model, plain: dict[int, list[int]]) -> None:
    assert texts(model, max_ubatch_tokens=7)[0] == plain


def test_prefix_hits(model: Model, plain: dict[int, list[int]]) -> None:
    found, engine = texts(model, num_states=64)
    for request_id, (prompt, options) in prompts().items():
        engine.add(Sequence(request_id, prompt, options, NUM_TOKENS))
    outputs = run(engine)
    assert {request_id: text(outputs, request_id) for request_id in plain} == found == plain
    assert engine.stats().counters.cached_tokens > 0


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_preemption(model: Model, plain: dict[int, list[int]], swap_bytes: int) -> None:
    found, engine = texts(model, num_blocks=22, swap_bytes=swap_bytes)
    counters = engine.stats().counters
    assert found == plain and counters.preemptions > 0
    assert bool(counters.swaps_in) == bool(swap_bytes)


def test_windows_of_no_more_blocks_than_one_or_two_sequences_need(
    model: Model, plain: dict[int, list[int]]
) -> None:
    windows = model.executors(1)[0].info.layout.windows
    if not windows:
        pytest.skip("no layer has a window")
    most = blocks_of_window(windows[-1], 4)
    for number, settings in ((1, {}), (2, {"swap_bytes": 1 << 20}), (2, {"speculate": "ngram:3"})):
        room = {"num_window_blocks": number * most + 2, "max_ubatch_tokens": 11}
        found, engine = texts(model, num_blocks=60, **room, **settings)
        assert found == plain
        assert engine.stats().window_blocks_used == 0


@pytest.mark.parametrize(
    "block_size", [3, pytest.param(4, marks=pytest.mark.full("blocks of one size are easier"))]
)
def test_transfers(model: Model, block_size: int) -> None:
    """Prompts share prefixes, and some continue an earlier response; blocks begin with NaN."""
    first_executor, second_executor, third_executor = model.executors(3)
    prefill = Engine(first_executor, num_blocks=128, block_size=4)
    decode = Engine(second_executor, num_blocks=256, block_size=block_size)
    assert isinstance(decode.cache, TorchKVCache)
    for pool in decode.cache.pools:
        pool.fill_(math.nan)
    head, num_shared = prompts()[0][0], 0
    prompt, found = list[int](), list[int]()
    prompts_in_turn = [head, head, head[:13], head[:12], [*head, 5, 6]]
    for number in range(9):
        prompt = prompts_in_turn[number] if number < 5 else [*prompt, *found, number + 9]
        request_id, options = number, SAMPLED if number % 2 else GREEDY
        prefill.add(Sequence(request_id, prompt, options, 3, transfer=True))
        outputs = run(prefill)
        (started,) = of_kind(outputs, Started)
        (first,) = text(outputs, request_id)
        decode.reserve(request_id, prompt)
        (reserved,) = of_kind(run(decode), Reserved)
        num_shared += reserved.cached_tokens
        sizes = (reserved.cached_tokens, len(prompt))
        for part in plan(decode.cache.layout, *sizes, 1 << 12):
            table = table_of(prefill.cache, part.group, started.block_table)
            kv = prefill.cache.pack(table, part)
            unpack(decode.cache, reserved.block_table, part, bytes(kv), len(prompt))
        decode.begin_decode(request_id, [*prompt, first], options, NUM_TOKENS)
        found = [first, *text(run(decode), request_id)]
        prefill.release(request_id)
        alone = Engine(third_executor, num_blocks=128, block_size=4)
        alone.add(Sequence(1, prompt, options, NUM_TOKENS + 1))
        assert found == text(run(alone), 1)
    assert num_shared > 50


def test_ngram_drafts(model: Model, plain: dict[int, list[int]]) -> None:
    found, engine = texts(model, speculate="ngram:4")
    assert found == plain
    drafted = engine.stats().counters.drafted_tokens
    if engine.info.layout.has_state:
        assert drafted == 0, "a state cannot go back"
    else:  # random models whose layers forget soon do not repeat themselves
        assert drafted > 0 or engine.info.layout.windows == (WINDOW,)


def test_a_draft_model(model: Model, plain: dict[int, list[int]]) -> None:
    if model.executors(1)[0].info.layout.has_state:
        pytest.skip("a state cannot go back: such a model drafts nothing")
    drafter: Drafter = ModelDrafter(model.executors(2)[1], 3, num_blocks=128, block_size=8)
    found, engine = texts(model, speculate=drafter)
    counters = engine.stats().counters
    assert found == plain and counters.accepted_tokens > 0.9 * counters.drafted_tokens > 0


def test_everything_at_once(model: Model, plain: dict[int, list[int]]) -> None:
    found, engine = texts(
        model, num_blocks=22, swap_bytes=1 << 14, speculate="ngram:3", max_ubatch_tokens=9
    )
    assert found == plain and engine.stats().counters.preemptions > 0
