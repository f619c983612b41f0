"""An engine on a model of several processes has the results of an engine on one."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from scripts.models.make_model import make_model
from tests.worker.compute.processes import CPU, Processes
from tests.worker.engine.hashed import of_kind, run, text
from tests.worker.paged import Text, batch_of
from wire.logprobs import unpack_prompt_logprobs
from wire.options import Options, Structure
from wire.process.model import DEMO
from wire.transfer import Rectangle
from worker.compute.model import load_model
from worker.compute.ranks import Ranks
from worker.engine.draft_model import ModelDrafter
from worker.engine.engine import Engine
from worker.engine.outputs import Token
from worker.engine.sequence import Sequence
from worker.executor.contract import Capabilities
from worker.executor.torch import TorchExecutor, make_cache
from worker.model.config import read_config
from worker.parallel.commands import Verb, receive
from worker.parallel.executor import ShardedExecutor, create
from worker.parallel.kv_copies import HEADER
from worker.parallel.microbatches import MIN_TOKENS, compute
from worker.parallel.partition import parts_of

VOCAB_SIZE, NUM_TOKENS = 1326, 16
GREEDY = Options(ignore_eos=True)
SCORED = Options(ignore_eos=True, prompt_logprobs=2)
NUMBERS = Options(structure=Structure(kind="regex", text="(2468 ){5,9}"))


class Scenario(NamedTuple):
    """Requests for an engine with these settings, in `rounds`, on a grid of shards x stages."""

    prompts: Many[list[int]]
    options: Options
    settings: dict[str, Any]
    grid: tuple[int, int]
    rounds: int = 1


class Answers(NamedTuple):
    """Texts, logprobs of scored prompts, and counters of the engine."""

    texts: list[list[int]]
    scores: list[list[float]]
    counts: dict[str, int]


def prompts_of(*lengths: int) -> list[list[int]]:
    """Return prompts that share a prefix and repeat words."""
    draw = random.Random(3)
    words = [draw.choices(range(5, VOCAB_SIZE), k=4) for _ in range(3)]
    head = [*words[0], *words[1], *words[0]]
    return [
        [*head, *(it for word in draw.choices(words, k=length) for it in word)][:length]
        for length in lengths
    ]


SCENARIOS = {
    "chunks and preemption": Scenario(
        prompts_of(16, 18, 21, 17), GREEDY, {"num_blocks": 14, "max_ubatch_tokens": 9}, (1, 2)
    ),
    "swap": Scenario(
        prompts_of(16, 18, 21, 17), GREEDY, {"num_blocks": 14, "swap_bytes": 1 << 20}, (2, 2)
    ),
    "drafts of a model and prefixes": Scenario(
        prompts_of(30, 33), GREEDY, {"speculate": "draft"}, (1, 2), rounds=2
    ),
    # So long that stages compute microbatches, with rows of logits in all of them.
    "microbatches and scores": Scenario(
        prompts_of(150, 7, 140), SCORED, {"max_ubatch_tokens": 512}, (2, 2)
    ),
    "structures and drafts of the text": Scenario(
        prompts_of(12, 20), NUMBERS, {"speculate": "ngram:4"}, (2, 1)
    ),
}
# The counters that prove that a scenario does what its name says.
COUNTED = {
    "chunks and preemption": ("preemptions",),
    "swap": ("swaps_in", "swaps_out"),
    "drafts of a model and prefixes": ("accepted_tokens", "cached_tokens"),
    "structures and drafts of the text": ("drafted_tokens",),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows on the first and the last of three layers: of two stages one has no other kind."""
    return make_model(
        tmp_path_factory.mktemp("model"),
        family="gemma3_text",
        num_hidden_layers=3,
        vocab_size=VOCAB_SIZE,
        eos_token_id=[0, 4],
        tokenizer=DEMO,
    )


def answers(executor: TorchExecutor, scenario: Scenario, path: Path) -> Answers:
    settings = {"num_blocks": 128, "block_size": 4} | scenario.settings
    if settings.get("speculate") == "draft":  # the model itself, which the leader has whole
        settings["speculate"] = ModelDrafter(whole(path), 3, num_blocks=128, block_size=8)
    engine = Engine(executor, **settings)
    engine.swap.costs.copy_bytes_per_s = 1e15  # always quicker than to compute again
    texts, scores = [], []
    for _ in range(scenario.rounds):
        for number, prompt in enumerate(scenario.prompts):
            engine.add(Sequence(number, prompt, scenario.options, NUM_TOKENS))
        outputs = run(engine, 5000)
        texts += [text(outputs, number) for number in range(len(scenario.prompts))]
        packed = {it.request_id: it.prompt_logprobs or b"" for it in of_kind(outputs, Token)[::-1]}
        for _, rows in sorted(packed.items()):
            scores += [[it.logprob for it in unpack_prompt_logprobs(rows)]] if rows else []
    counters = engine.stats().counters
    names = {name for names in COUNTED.values() for name in names}
    return Answers(texts, scores, {name: getattr(counters, name) for name in names})


def whole(path: Path) -> TorchExecutor:
    return TorchExecutor.load(path, name="tiny", device="cpu", dtype="float32")


def loaded(ranks: Ranks, path: Path, **settings: Any) -> ShardedExecutor:
    chosen = {"device": "cpu", "dtype": "float32"} | settings
    return create(model_path=path, model_name="tiny", ranks=ranks, **chosen)


def answer_together(ranks: Ranks, path: Path, scenario: Scenario) -> Answers | None:
    executor = loaded(ranks, path)
    if not ranks.is_leader:
        executor.follow()
        return None
    found = answers(executor, scenario, path)
    executor.shutdown()
    return found


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_an_engine_answers_as_on_one_process(name: str, processes: Processes, path: Path) -> None:
    scenario = SCENARIOS[name]
    wanted = answers(whole(path), scenario, path)
    assert all(wanted.counts[count] > 0 for count in COUNTED.get(name, ())), wanted.counts
    assert all(wanted.texts) and bool(wanted.scores) == (scenario.options is SCORED)
    found, *_ = processes.run(*scenario.grid, answer_together, path, scenario)
    assert found.texts == wanted.texts
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-3, atol=1e-3)
    assert all(found.counts[count] > 0 for count in COUNTED.get(name, ())), found.counts


@pytest.mark.parametrize(
    ("lengths", "settings", "grid", "counts"),
    [
        # So long that a step of a model without states would be cut.
        (
            (2 * MIN_TOKENS + 14, 20),
            {"num_blocks": 76, "max_ubatch_tokens": 512},
            (1, 2),
            ["swaps_in"],
        ),
        (
            (16, 18, 21, 17),
            {"num_blocks": 14, "max_ubatch_tokens": 9},
            (2, 2),
            ["preemptions", "swaps_in", "cached_tokens"],
        ),
    ],
    ids=["not cut", "divided"],
)
def test_states_are_preempted_swapped_and_shared_as_in_one_process(
    lengths: tuple[int, ...],
    settings: dict[str, Any],
    grid: tuple[int, int],
    counts: list[str],
    processes: Processes,
    tmp_path: Path,
) -> None:
    path = make_model(tmp_path, family="qwen3_next", vocab_size=VOCAB_SIZE, tokenizer=DEMO)
    settings = settings | {"swap_bytes": 1 << 22}
    scenario = Scenario(prompts_of(*lengths), GREEDY, settings, grid, rounds=len(lengths) // 2)
    wanted = answers(whole(path), scenario, path)
    found, *_ = processes.run(*grid, answer_together, path, scenario)
    assert found.texts == wanted.texts and all(wanted.texts)
    for count in counts:
        assert wanted.counts[count] > 0 and found.counts[count] > 0, (wanted, found)


def copy_after_a_step(ranks: Ranks, path: Path) -> None:
    executor = loaded(ranks, path)
    rectangle = Rectangle(0, range(1), range(1, 2), range(3))
    if ranks.is_leader:
        cache = executor.allocate(8, 16)
        executor.forward(batch_of([(Text([1, 2, 3], [5]), 3)], 16))
        cache.pack([5], rectangle)
        return
    layout = executor.info.layout
    model = load_model(path, torch.float32, CPU, compiled=True, ranks=ranks)
    _, part = parts_of(layout, read_config(path), 2, 1)
    assert receive(ranks).verb is Verb.ALLOCATE
    step = receive(ranks).step
    assert step is not None
    compute(model, make_cache(model, part.layout, 8, 16), step)
    header = torch.empty(HEADER, dtype=torch.int64)
    ranks.receive_from(header, 0)
    ranks.receive_from(torch.empty(1, dtype=torch.int64), 0)
    ranks.send_to(torch.zeros(rectangle.num_bytes(layout), dtype=torch.uint8), 0)
    assert header[1] == 1, "so many steps are to be computed first"


def test_what_is_copied_waits_for_the_steps_that_others_were_told(
    processes: Processes, path: Path
) -> None:
    processes.run(2, 1, copy_after_a_step, path)


def describe(ranks: Ranks, path: Path) -> tuple[Capabilities, int]:
    executor = loaded(ranks, path)
    own = load_model(path, torch.float32, CPU, compiled=True, ranks=ranks).parameter_bytes
    if ranks.is_leader:
        executor.shutdown()  # nothing was allocated
        executor.shutdown()
        with pytest.raises(AssertionError, match="allocate after shutdown"):
            executor.allocate(8, 16)
    else:
        executor.follow()
    return executor.capabilities, own


def test_capabilities_are_the_sum_over_all_processes(processes: Processes, tmp_path: Path) -> None:
    size, stages = 2, 2
    path = make_model(
        tmp_path,
        family="gemma3_text",
        num_key_value_heads=1,
        num_hidden_layers=3,
        sliding_window=6,
    )
    one = whole(path).capabilities
    assert one.memory.window_bytes_per_token > 0
    described = processes.run(size, stages, describe, path)
    for found, _ in described:
        assert (found.num_shards, found.num_stages) == (size, stages)
        assert found.memory.parameter_bytes == sum(own for _, own in described)
        # The one head of keys and values is in every shard.
        assert found.memory.kv_bytes_per_token == size * one.memory.kv_bytes_per_token
        assert found.memory.window_bytes_per_token == size * one.memory.window_bytes_per_token
        assert found.memory.activation_bytes_per_token >= one.memory.activation_bytes_per_token
        assert found.arithmetic == one.arithmetic + f" in {size} shards"
        assert (found.attention, found.speculative) == (one.attention, True)


def load_as(ranks: Ranks, path: Path, dtypes: list[str]) -> None:
    loaded(ranks, path, dtype=dtypes[ranks.shard.process])


def test_a_model_that_does_not_divide_is_refused_by_every_process(
    processes: Processes, path: Path
) -> None:
    for is_done, why in processes.outcomes(3, 1, load_as, path, ["float32"] * 3):
        assert not is_done and "--tensor-parallel may be 1, 2, 4 for this model" in why
    for is_done, why in processes.outcomes(1, 4, load_as, path, ["float32"] * 4):
        assert not is_done and "--pipeline-parallel may be 1 to 3 for this model" in why


def test_processes_that_compute_differently_refuse_to(processes: Processes, path: Path) -> None:
    outcomes = processes.outcomes(2, 1, load_as, path, ["float32", "bfloat16"])
    for number, (is_done, why) in enumerate(outcomes):
        assert not is_done and f"compute differently, process {number} in cpu " in why
        assert "the same --dtype and --weights" in why


def go_on_without_the_other(ranks: Ranks, path: Path) -> str:
    executor = loaded(ranks, path)
    if not ranks.is_leader:
        assert receive(ranks).verb is Verb.ALLOCATE
        os._exit(1)
    executor.allocate(8, 16)
    with pytest.raises(RuntimeError):
        for _ in range(3):  # the first may still find room on its way
            executor.forward(batch_of([(Text([1, 2, 3], [0]), 3)], 16))
    executor.shutdown()
    return "it is shut down"


def test_a_leader_left_alone_notices_and_can_be_shut_down(path: Path, tmp_path: Path) -> None:
    with Processes(2, tmp_path) as started:
        outcomes = started.outcomes(2, 1, go_on_without_the_other, path)
    assert outcomes == [(True, "it is shut down"), (False, "died")]


def load_while_the_other_goes(ranks: Ranks, path: Path) -> None:
    if ranks.is_leader:
        os._exit(1)
    with pytest.raises(ConnectionError, match="the processes of this worker have parted"):
        loaded(ranks, path)


def test_who_loads_while_another_dies_says_so_and_not_that_it_cannot_load(
    path: Path, tmp_path: Path
) -> None:
    with Processes(2, tmp_path) as started:
        outcomes = started.outcomes(2, 1, load_while_the_other_goes, path)
    assert outcomes == [(False, "died"), (True, None)]
