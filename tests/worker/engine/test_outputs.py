"""The part of a failure that crosses the network."""

import pytest

from wire.errors import ErrorCode
from worker.engine.outputs import Failed


@pytest.mark.parametrize("code", ErrorCode)
def test_only_the_message_of_a_model_stays_on_the_worker(code: ErrorCode) -> None:
    error = Failed(7, code, "KeyError: 'a piece of the prompt'").for_peers()
    assert error.code is code
    assert ("a piece of the prompt" in error.message) == (code is not ErrorCode.MODEL_FAILED)
