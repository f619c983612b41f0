"""Options of the whole suite."""

import asyncio.constants
import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# As workers set it for themselves (`worker.__main__`), before torch is imported: by default
# OpenMP's threads spin while they wait, on the cores that the other half of the tests needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Under PYTHONASYNCIODEBUG the stack of whoever makes a task or a callback is written down, of each:
# three frames of it, for next to none is ever shown.
asyncio.constants.DEBUG_STACK_DEPTH = 3  # type: ignore[misc]

# A loaded machine is no bug: no example has a time of its own.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the test modules without looking for garbage, nor among what they import later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every kernel in every shape: minutes")
