"""A Prefiller and a ForwardModel are served, their logits sampled, their mistakes named."""

import pytest

from tests.worker.executor.forward_pair import DIM, HEADS, ForwardModel, Prefiller, pair
from wire.options import Options
from worker.engine.instrumented import Direct
from worker.executor.contract import SequenceFailed


def test_the_forward_model_sees_all_earlier_tokens() -> None:
    model = ForwardModel()
    executor = pair(model=model)
    sequence = (direct := Direct(executor, executor.allocate(8, 4))).prefill([1, 2, 3, 4, 5])
    direct.decode(sequence)
    assert model.seen == [(4, HEADS, DIM), (5, HEADS, DIM)]
    assert executor.info.name == "pair", "as the settings say"


def test_its_logits_are_sampled_with_the_request_s_options() -> None:
    def draw(**options: float) -> int:
        executor = pair()
        direct = Direct(executor, executor.allocate(8, 4))
        return direct.prefill([1, 2, 3], Options(**options)).token_ids[-1]  # type: ignore[arg-type]

    greedy = draw()
    assert draw(temperature=2.0, top_k=1) == greedy
    assert len({draw(temperature=2.0, seed=seed) for seed in range(30)}) > 1
    assert draw(temperature=2.0, seed=4) == draw(temperature=2.0, seed=4)


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("prefiller", "num_layers", 3, "the prefiller has 3 layers, the layout 2"),
        ("model", "vocab_size", 49, r"logits are \(49,\), not \(50,\)"),
        ("model", "num_rows", 2, "gave 16 values for k of layer 0, not 1 tokens x 2 x 4"),
    ],
)
def test_a_wrong_shape_is_named(part: str, name: str, value: int, message: str) -> None:
    prefiller, model = Prefiller(), ForwardModel()
    setattr({"prefiller": prefiller, "model": model}[part], name, value)
    executor = pair(prefiller, model)
    with pytest.raises(SequenceFailed, match=message):
        Direct(executor, executor.allocate(8, 4)).prefill([1, 2])
