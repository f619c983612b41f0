"""Time for the cluster of all clients to start."""

from pathlib import Path

import pytest

from tests.cluster import START_S

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(2 * START_S))
