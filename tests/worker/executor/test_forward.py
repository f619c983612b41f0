"""A Prefiller and a ForwardModel are served, their logits sampled, their mistakes named."""

import pytest

from tests.worker.executor.forward_pair import DIM, HEADS, LAYERS, ForwardModel, Prefiller, pair
from wire.options import Options
from worker.engine.instrumented import Direct
from worker.executor.contract import Attention, SequenceFailed


def test_kv_is_float32_of_its_own_shape_on_the_wire() -> None:
    executor = pair()
    (group,) = executor.info.layout.kv_groups
    assert (
        group.num_layers,
        group.num_kv_heads,
        group.key_dim,
    ) == (LAYERS, HEADS, DIM)
    assert group.dtype == "float32" and executor.info.name == "pair"
    assert executor.capabilities.attention == {Attention.PAGED}
    assert not executor.capabilities.speculative


def test_the_forward_model_sees_all_earlier_tokens() -> None:
    model = ForwardModel()
    executor = pair(model=model)
    sequence = (direct := Direct(executor, executor.allocate(8, 4))).prefill([1, 2, 3, 4, 5])
    direct.decode(sequence)
    assert model.seen == [(4, HEADS, DIM), (5, HEADS, DIM)]


def test_its_logits_are_sampled_with_the_request_s_options() -> None:
    def draw(**options: float) -> int:
        executor = pair()
        direct = Direct(executor, executor.allocate(8, 4))
        return direct.prefill([1, 2, 3], Options(**options)).token_ids[-1]  # type: ignore[arg-type]

    greedy = draw()
    assert draw(temperature=2.0, top_k=1) == greedy
    assert len({draw(temperature=2.0, seed=seed) for seed in range(30)}) > 1
    assert draw(temperature=2.0, seed=4) == draw(temperature=2.0, seed=4)


def test_logprobs_come_when_asked_for() -> None:
    executor = pair()
    direct = Direct(executor, executor.allocate(8, 4))
    sequence = direct.prefill([1, 2, 3], Options(logprobs=3))
    logprobs = direct.decode(sequence).logprobs
    assert logprobs is not None and len(logprobs.top) == 3


def test_the_wrong_number_of_layers_is_named() -> None:
    prefiller = Prefiller()
    prefiller.num_layers = 3
    executor = pair(prefiller)
    with pytest.raises(SequenceFailed, match="the prefiller has 3 layers, the layout 2"):
        Direct(executor, executor.allocate(8, 4)).prefill([1, 2])


def test_the_wrong_number_of_logits_is_named() -> None:
    model = ForwardModel()
    model.vocab_size = 49
    executor = pair(model=model)
    with pytest.raises(SequenceFailed, match=r"logits are \(49,\), not \(50,\)"):
        Direct(executor, executor.allocate(8, 4)).prefill([1, 2])


def test_the_wrong_number_of_values_is_named() -> None:
    model = ForwardModel()
    model.num_rows = 2
    executor = pair(model=model)
    expected = "the forward model gave 16 values for k of layer 0, not 1 tokens x 2 x 4"
    with pytest.raises(SequenceFailed, match=expected):
        Direct(executor, executor.allocate(8, 4)).prefill([1, 2])
