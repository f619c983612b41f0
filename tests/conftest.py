"""Options of the whole suite."""

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine is no bug: no example has a time of its own.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every kernel in every shape: minutes")
