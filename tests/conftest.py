"""Options of the whole suite, and the cluster that many tests share."""

from __future__ import annotations

import asyncio.constants
import gc
import logging
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # most tests need none, nor what it imports
    from tests.cluster import Cluster

# As workers set it for themselves (`worker.start`), before torch is imported: by default
# OpenMP's threads spin while they wait, on the cores that the other half of the tests needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# In asyncio's debug mode the stack of whoever makes a task or a callback is written down, of each:
# three frames of it, for next to none is ever shown.
asyncio.constants.DEBUG_STACK_DEPTH = 3  # type: ignore[misc]

# A loaded machine is no bug: nothing is said of a callback that took long, as it would be in debug
# mode, and no example has a time of its own.
logging.getLogger("asyncio").addFilter(
    lambda record: not str(record.msg).startswith("Executing %s took")
)
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
    parser.addoption(
        "--full",
        action="store_true",
        help="every kernel in every shape, every family of models in a cluster: minutes",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `full`, without --full."""
    for item in [] if config.getoption("--full") else items:
        if mark := item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]}: with --full"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker on the demo model, for clients and system tests."""
    from tests.cluster import Cluster

    with Cluster(tmp_path_factory.mktemp("demo")) as cluster:
        yield cluster
