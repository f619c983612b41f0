"""A program's arguments are checked before anything is queued."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from wire.options import Options, decode_options, encode_options
from worker.embedded.arguments import checked_ids, checked_options


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", -1, "seed is -1: Expected `int` >= 0"),
        ("temperature", 2.5, "temperature is 2.5: Expected `float` <= 2.0"),
        ("temperature", math.nan, "temperature is nan: Expected `float` >= 0.0"),
        ("logit_bias", ((-1, 100.0),), r"logit_bias is \(\(-1, 100.0\),\): Expected `int` >= 0"),
        ("max_tokens", 3.5, "max_tokens is 3.5: Expected `int | null`, got `float`"),
        ("stop_token_ids", None, "stop_token_ids is None: Expected `array`, got `null`"),
        ("stop_token_ids", (object(),), "stop_token_ids is .*Expected `int`, got `str`"),
    ],
)
def test_the_field_its_value_and_its_range_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_options(Options(**{field: value}))


def test_what_the_wire_accepts_comes_through_unchanged() -> None:
    options = Options(temperature=0.5, seed=7, stop_token_ids=(3, 4), logit_bias=((5, -1.5),))
    assert checked_options(options) == options == decode_options(encode_options(options))
    assert checked_options(None) == Options()


def test_lists_and_numbers_of_numpy_become_what_the_engine_computes_with() -> None:
    loose: dict[str, Any] = {
        "stop_token_ids": [3, np.int64(4)],
        "temperature": np.float32(0.5),
        "seed": np.uint64(2**63 - 1),
        "max_tokens": np.int32(9),
    }
    options = checked_options(Options(**loose))
    assert options == Options(stop_token_ids=(3, 4), temperature=0.5, seed=2**63 - 1, max_tokens=9)
    assert [type(options.seed), type(options.temperature)] == [int, float]
    assert hash(options.stop_token_ids)


@pytest.mark.parametrize("options", [{"max_tokens": 3}, 5, "greedy"])
def test_options_of_another_kind_are_refused(options: Any) -> None:
    with pytest.raises(TypeError, match=r"not wire\.options\.Options"):
        checked_options(options)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ("hello", r"token_ids\[0\] is 'h', not an integer"),
        ([1, 2.0], r"token_ids\[1\] is 2.0, not an integer"),
        (np.zeros((2, 2), np.int32), r"token_ids\[0\] is array\(\[0, 0\]"),
        (5, "not iterable"),
    ],
)
def test_what_is_no_integer_is_no_token(token_ids: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        checked_ids(token_ids)


@pytest.mark.parametrize(
    "token_ids", [(1, 2, 3), range(1, 4), b"\1\2\3", np.array([1, 2, 3]), torch.tensor([1, 2, 3])]
)
def test_integers_of_any_kind_become_plain_ones(token_ids: Any) -> None:
    ids = checked_ids(token_ids)
    assert ids == [1, 2, 3] and {type(token_id) for token_id in ids} == {int}
    assert msgspec.msgpack.encode(ids)
