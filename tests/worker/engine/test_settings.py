"""One declaration for every engine, whoever makes it."""

from typing import Any

import pytest

from worker.engine.engine import Engine
from worker.engine.settings import EngineSettings
from worker.executor.contract import Capabilities, MemoryRequirements
from worker.executor.hash import create

MEMORY = MemoryRequirements(0, 0, 1)


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        Engine(create(), num_blocks=4, block_size=4, max_tokens=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_ubatch_tokens", 0), ("max_sbatch_sequences", 0), ("ageing_s", 0.0), ("swap_bytes", -1)],
)
def test_a_setting_out_of_its_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Engine(create(), num_blocks=4, block_size=4, **{name: value})


def test_settings_leave_out_features_that_an_executor_lacks() -> None:
    settings = EngineSettings(max_sbatch_sequences=9, speculate="ngram:4", swap_bytes=5)
    able = Capabilities(MEMORY, speculative=True)
    assert settings.within(able) == settings
    single = Capabilities(MEMORY, max_batch_sequences=2, continuous_batching=False)
    expected = EngineSettings(
        max_sbatch_sequences=2, speculate=None, swap_bytes=5, dynamic_batching=False
    )
    assert settings.within(single) == expected
