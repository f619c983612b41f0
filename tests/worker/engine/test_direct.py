"""What every executor must do, driven by hand: seed 003's prefill, decode and release_cache."""

import random
from collections.abc import Callable

import pytest

from scripts.examples import own_model
from scripts.models.make_model import make_model
from tests.worker.executor.forward_pair import pair
from wire.options import Options
from wire.segment import Rectangle
from worker.engine.direct import Direct
from worker.engine.sequence import Sequence, Status
from worker.executor.contract import Executor, KVCache
from worker.executor.hash import create
from worker.executor.torch import TorchExecutor

Make = Callable[[], Executor]
OPTIONS = Options(ignore_eos=True)


@pytest.fixture(scope="module", params=["hash", "functions", "forward", "torch"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    if request.param == "torch":
        path = make_model(tmp_path_factory.mktemp("model"))
        return lambda: TorchExecutor.load(path, name="tiny", dtype="float32", device="cpu")
    makes: dict[str, Make] = {"hash": create, "functions": own_model.create, "forward": pair}
    return makes[request.param]


def start(make: Make, block_size: int = 4) -> tuple[Direct, KVCache]:
    executor = make()
    cache = executor.allocate(24, block_size)
    return Direct(executor, cache), cache


def prompt(executor: Make, length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(min(executor().info.vocab_size, 200)), k=length)


def text(direct: Direct, token_ids: list[int], num_tokens: int) -> list[int]:
    sequence = direct.prefill(token_ids, OPTIONS)
    for _ in range(num_tokens - 1):
        direct.decode(sequence)
    direct.release_cache(sequence)
    return sequence.token_ids[len(token_ids) :]


@pytest.mark.parametrize("length", [1, 2, 9])
def test_reading_at_once_and_token_by_token_say_the_same(make: Make, length: int) -> None:
    direct, _ = start(make)
    token_ids = prompt(make, length)
    generated = text(direct, token_ids, 8)
    for num_read in (1, 4, 7):
        read = token_ids + generated[:num_read]
        assert text(direct, read, 1) == generated[num_read : num_read + 1]


def test_a_batch_says_what_each_says_alone(make: Make) -> None:
    direct, _ = start(make)
    prompts = [prompt(make, length, length) for length in (1, 6, 11)]
    alone = [text(direct, each, 5) for each in prompts]
    sequences = direct.batch_prefill(prompts, OPTIONS)
    for _ in range(4):
        tokens = direct.batch_decode(sequences)
    assert [token.token_id for token in tokens] == [each[-1] for each in alone]
    generated = [s.token_ids[s.prompt_len :] for s in sequences]
    assert generated == alone


@pytest.mark.parametrize("block_size", [4, 7])
def test_kv_handed_over_goes_on_the_same(make: Make, block_size: int) -> None:
    sender, cache = start(make)
    token_ids = prompt(make, 10)
    expected = text(sender, token_ids, 6)
    sent = sender.prefill(token_ids, OPTIONS)
    receiver, other_cache = start(make, block_size)
    receiver.prefill(prompt(make, 5, 8), OPTIONS)  # its blocks are not the sender's
    received: Sequence = receiver.prefill(prompt(make, 10, 9), OPTIONS)
    for layer in range(cache.layout.num_layers):
        rectangle = Rectangle(layer, 1, 0, 10)
        segment = cache.pack(sent.block_table, rectangle)
        other_cache.unpack(received.block_table, rectangle, segment)
    received.token_ids[:] = sent.token_ids
    for _ in range(5):
        receiver.decode(received)
    assert received.token_ids[10:] == expected


def test_released_blocks_are_used_again(make: Make) -> None:
    direct, cache = start(make)
    length = cache.num_blocks * cache.block_size
    for seed in range(3):
        sequence = direct.prefill(prompt(make, length, seed), OPTIONS)
        with pytest.raises(ValueError, match="1 more blocks are too many, 0 left"):
            direct.decode(sequence)
        direct.release_cache(sequence)
        assert sequence.status is Status.FINISHED
