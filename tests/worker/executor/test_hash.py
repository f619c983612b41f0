"""The next token depends on every KV byte of the context, and on nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import oracle
from wire.options import Options
from worker.engine.batch import Chunk, build
from worker.engine.sequence import Sequence
from worker.executor.batch import BatchType
from worker.executor.hash import (
    EOS_TOKEN_IDS,
    MAX_MODEL_LEN,
    MIXED,
    WINDOW,
    HashExecutor,
    HashKVCache,
    create,
    create_mixed,
)

PROMPT = list(range(10, 21))


def start(
    block_size: int = 4, blocks: tuple[int, ...] = (5, 1, 3)
) -> tuple[HashExecutor, HashKVCache]:
    """Compute the prompt's KV."""
    executor = create()
    cache = executor.allocate(8, block_size)
    step(executor, block_size, blocks, PROMPT, 0)
    return executor, cache


def step(
    executor: HashExecutor,
    block_size: int,
    blocks: tuple[int, ...],
    token_ids: list[int],
    computed: int,
    options: Options | None = None,
) -> int:
    sequence = Sequence(1, token_ids, options)
    sequence.prompt_len = len(PROMPT)
    sequence.block_table.extend(blocks)
    sequence.num_computed_tokens = computed
    batch = build(BatchType.PREFILL, [Chunk(sequence, len(token_ids) - computed)], block_size)
    (token,) = executor.sample(executor.forward(batch), batch)
    return token.token_id


@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
def test_the_next_token_is_the_oracle_s_whatever_the_blocks(block_size: int) -> None:
    blocks = tuple(range(12))[::-1]
    executor = create()
    executor.allocate(12, block_size)
    assert [step(executor, block_size, blocks, PROMPT, 0)] == oracle(PROMPT, 1)


def test_every_byte_of_the_context_matters_and_no_other() -> None:
    executor, cache = start()
    expected = step(executor, 4, (5, 1, 3), PROMPT, 10)
    context = np.zeros(cache.kv.shape, bool)
    for position in range(len(PROMPT)):
        context[(5, 1, 3)[position // 4], :, :, :, position % 4] = True
    context[3, :, :, :, 2] = False  # the last token's KV is written again by the step
    random = np.random.default_rng(1)
    for place in random.permutation(np.argwhere(context))[:150]:
        cache.kv[tuple(place)] ^= 1
        assert step(executor, 4, (5, 1, 3), PROMPT, 10) != expected
        cache.kv[tuple(place)] ^= 1
    cache.kv[~context] ^= 0xFF
    assert step(executor, 4, (5, 1, 3), PROMPT, 10) == expected


def test_greedy_ignores_the_seed_and_sampling_does_not() -> None:
    executor, _ = start()

    def draw(**options: float) -> int:
        return step(executor, 4, (5, 1, 3), PROMPT, 10, Options(**options))  # type: ignore[arg-type]

    assert draw(seed=1) == draw(seed=2) == draw()
    drawn = {
        draw(temperature=1.0, seed=seed, choice=choice) for seed in (1, 2) for choice in (0, 1)
    }
    assert len(drawn) == 4
    assert draw(temperature=1.0, seed=1) == draw(temperature=0.5, seed=1)


@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize("cuts", [(40,), (1, 2, 15, 40), (13, 26, 40), tuple(range(1, 41))])
def test_chunks_of_a_prompt_do_not_change_the_token_of_mixed_layers(
    block_size: int, cuts: tuple[int, ...]
) -> None:
    prompt, executor, computed = list(range(10, 50)), create_mixed(), 0
    executor.allocate(40, block_size, 80)
    for cut in cuts:
        token = step(executor, block_size, tuple(range(40)), prompt[:cut], computed)
        assert [token] == oracle(prompt[:cut], 1, Options(ignore_eos=True), layout=MIXED) or (
            token in EOS_TOKEN_IDS
        )
        computed = cut


def test_mixed_layers_see_all_tokens_the_last_ones_and_a_state() -> None:
    executor = create_mixed()
    cache = executor.allocate(8, 16, 16)
    step(executor, 16, (0, 1, 2), list(range(40)), 0)
    before, kv = cache.digest([0, 1, 2], 40), (cache.kv, cache.window_kv)
    for token in range(40):
        block, offset = divmod(token, 16)
        for layer, sees in ((0, True), (1, token >= 40 - WINDOW)):
            kv[layer][block, 0, 1, 0, offset, 3] ^= 1
            assert (cache.digest([0, 1, 2], 40) != before) == sees
            kv[layer][block, 0, 1, 0, offset, 3] ^= 1
    (states,) = cache.states.values()
    states[cache.state_slots.find([0, 1, 2], 40), 1, 3, 7] ^= 1
    assert cache.digest([0, 1, 2], 40) != before
    assert not executor.capabilities.speculative, "a state cannot go back"


def test_the_vocabulary_comes_from_the_model_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 77, "eos_token_id": 5}))
    info = create(model_path=tmp_path).info
    assert (info.vocab_size, info.eos_token_ids) == (77, frozenset({5}))
    assert info.max_model_len == MAX_MODEL_LEN
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert create(model_path=tmp_path, max_model_len=100).info.eos_token_ids == {5, 6}
    assert create(model_path=tmp_path, max_model_len=100).info.max_model_len == 100


@pytest.mark.parametrize("config", [{"vocab_size": "many"}, {"eos_token_id": ["</s>"]}, [1]])
def test_a_broken_model_directory_is_refused(tmp_path: Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"whole numbers|not a JSON object"):
        create(model_path=tmp_path)
